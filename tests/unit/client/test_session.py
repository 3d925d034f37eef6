"""What `instep.join` refuses before there is a run."""

import pytest

import instep
from instep.errors import SpecError


def test_hosts_are_refused_by_a_session_which_starts_no_process(tmp_path):
    launch = {"hosts": ["ssh one", "ssh two"]}
    with pytest.raises(SpecError) as caught:
        instep.join(name="net", runs=tmp_path / "runs", network="private", launch=launch)
    assert str(caught.value).startswith("launch.hosts = ['ssh one', 'ssh two']: instep.join starts")
    assert not (tmp_path / "runs").exists()
