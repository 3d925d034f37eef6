"""What `instep.join` refuses before there is a run."""

import pytest
from msgspec.structs import replace

import instep
from instep.client.join.joining import check_same
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        ({"hosts": ["ssh one", "ssh two"]}, "launch.hosts = ['ssh one', 'ssh two']"),
        ({"on": "local"}, "launch.on = 'local'"),
    ],
)
def test_a_session_which_starts_no_process_refuses_hosts_and_a_launcher(tmp_path, launch, named):
    with pytest.raises(SpecError) as caught:
        instep.join(name="net", runs=tmp_path / "runs", network="private", launch=launch)
    assert str(caught.value).startswith(f"{named}: instep.join starts no processes")
    assert not (tmp_path / "runs").exists()


def test_a_process_that_asks_for_another_job_than_process_0_is_refused():
    first = JobSpec(recipe="/here/own.py:main", name="a", train=TrainSpec(global_batch=16))
    check_same(replace(first, recipe="/there/own.py:main", arguments={"path": "/there"}), first, 1)
    for change, words in (
        ({"name": "b"}, "name = 'b' in process 1, and with 'a' in process 0"),
        ({"train": TrainSpec(global_batch=8)}, "train.global_batch = 8 in process 1, and with 16"),
    ):
        with pytest.raises(SpecError, match=words):
            check_same(replace(first, **change), first, 1)


def test_a_session_which_starts_no_process_refuses_servers(tmp_path):
    with pytest.raises(SpecError, match="starts no processes, and servers are some"):
        instep.join(name="s", runs=tmp_path / "runs", sync={"name": "server_sync"})
    assert not (tmp_path / "runs").exists()
