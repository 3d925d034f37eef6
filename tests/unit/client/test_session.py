"""What `instep.join` refuses before there is a run."""

import pytest

import instep
from instep.errors import SpecError


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        ({"hosts": ["ssh one", "ssh two"]}, "launch.hosts = ['ssh one', 'ssh two']"),
        ({"name": "local"}, "launch.name = 'local'"),
    ],
)
def test_a_session_which_starts_no_process_refuses_hosts_and_a_launcher(tmp_path, launch, named):
    with pytest.raises(SpecError) as caught:
        instep.join(name="net", runs=tmp_path / "runs", network="private", launch=launch)
    assert str(caught.value).startswith(f"{named}: instep.join starts no processes")
    assert not (tmp_path / "runs").exists()


def test_a_session_which_starts_no_process_refuses_servers(tmp_path):
    with pytest.raises(SpecError, match="starts no processes, and servers are some"):
        instep.join(name="s", runs=tmp_path / "runs", sync={"name": "server_sync"})
    assert not (tmp_path / "runs").exists()
