"""Parameter servers on emulated hosts, encrypted: whole hosts are killed and stopped."""

import json
import signal
from pathlib import Path

import psutil
import pytest
from started import Start, Started, newest_pids
from test_leased_runs import STEPS, check_exact, write_job
from test_partitions import needs_hosts
from test_recovery import check_same_result, has_saved_twice, undisturbed
from test_servers import begin

from instep.errors import PeerError
from instep.lab import netlab
from instep.store.run_folder import RunFolder

pytestmark = [pytest.mark.process, needs_hosts, pytest.mark.slow]

__all__ = ["undisturbed"]  # the fixture


def launch(network: netlab.Network) -> str:
    hosts = json.dumps([f"ip netns exec {network.name}-{host}" for host in network.hosts])
    return f'[launch]\nhosts = {hosts}\naddress = "{network.address(netlab.OUTSIDE)}"\n'


def homes(program: Started) -> dict[int, int]:
    """The newest host of each member."""
    return {int(e["worker"]): int(e["host"]) for e in program.events("worker_joined")}


def all_of(program: Started, host: int) -> list[psutil.Process]:
    """A host's fork server, and all that it has started."""
    pid = [int(e["pid"]) for e in program.events("host_joined") if e["host"] == host][-1]
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def send(processes: list[psutil.Process], what: signal.Signals) -> None:
    for process in processes:
        if process.is_running():
            process.send_signal(what)


def check_is_encrypted_and_nothing_is_left(program: Started) -> None:
    assert program.events("run_started")[0]["encrypted"] is True
    program.check_no_process_is_left()
    program.check_no_file_is_left()


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_host_with_a_server_is_lost_and_the_copy_on_another_is_used(
    start: Start, tmp_path: Path, undisturbed: Path, what: signal.Signals
) -> None:
    with netlab.Network(3) as network:
        there = "", launch(network)
        program = begin(start, tmp_path, 2, 2, copy=True, pause_s=8, hosts=there)
        program.until(lambda: has_saved_twice(program), "saved")
        before, pids = homes(program), newest_pids(program)
        assert before[2] != before[3]
        hit = all_of(program, before[3])
        send(hit, what)
        program.until(lambda: newest_pids(program)[3] != pids[3], "with the server elsewhere")
        send(hit, signal.SIGCONT)
        assert program.end() == 0, program.stderr
    check_same_result(program, undisturbed)
    assert not program.events("went_back")
    check_is_encrypted_and_nothing_is_left(program)


@pytest.mark.parametrize(
    ("what", "servers"),
    [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGKILL, 2)],
    ids=["killed", "stopped", "killed, with two servers"],
)
def test_a_host_of_workers_is_lost_and_each_micro_batch_is_committed_once_to_the_servers(
    start: Start, tmp_path: Path, what: signal.Signals, servers: int
) -> None:
    with netlab.Network(3) as network:
        job = write_job(tmp_path, 3, f'name = "server_async"\nservers = {servers}', 0.05)
        with job.open("a") as file:
            file.write(launch(network))
        program = start("-m", "instep", "run", job)
        program.until(program.is_training, "training")
        places = homes(program)
        away = next(n for n in range(3) if n not in (places[3], places[3 + servers - 1]))
        lost = {n for n, host in places.items() if host == away}
        pids = newest_pids(program)
        hit = all_of(program, away)
        send(hit, what)
        program.until(
            lambda: all(newest_pids(program)[n] != pids[n] for n in lost), "workers elsewhere"
        )
        send(hit, signal.SIGCONT)
        assert program.end() == 0, program.stderr
    check_exact(RunFolder(program.run))
    for server in range(3, 3 + servers):  # they have seen nothing of it
        assert newest_pids(program)[server] == pids[server]
    check_is_encrypted_and_nothing_is_left(program)


def test_a_host_that_is_lost_with_the_only_copy_of_the_parameters_ends_the_run_to_be_resumed(
    start: Start, tmp_path: Path
) -> None:
    with netlab.Network(3) as network:
        job = write_job(tmp_path, 2, 'name = "server_async"', 0.05)
        with job.open("a") as file:
            file.write(launch(network))
        program = start("-m", "instep", "run", job)
        program.until(program.is_training, "training")
        program.until(lambda: len(program.events("checkpoint_saved")) > 0, "saved")
        send(all_of(program, homes(program)[2]), signal.SIGKILL)
        code = program.end()
        if code != 0:
            assert code == PeerError.exit_code
            assert "Resume the run" in program.stderr
            again = start("-m", "instep", "resume", program.run)
            assert again.end() == 0, again.stderr
    check_exact(RunFolder(program.run), STEPS)
    check_is_encrypted_and_nothing_is_left(program)
