"""Who is in a run is told by its log; only those are signalled."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from started import wait_until_it_is_itself

from instep.lab.chaos.run_processes import Known, Processes, roles_of, send
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

FORKS = (  # stands for a worker with a loader process of its own, and a program that it started
    "import os, subprocess, sys\n"
    "pid = os.fork()\n"
    "program = subprocess.Popen([sys.executable, '-c', 'input() #'], stdin=0) if pid else None\n"
    "print(pid, program.pid if pid else 0, flush=True) if pid else None\n"
    "sys.stdin.read()\n"
)


class Stand(subprocess.Popen[str]):
    """A process that waits for its end, and looks like one of a run, or not."""

    def __init__(self, code: str = "input()", mark: str = "instep") -> None:
        command = [sys.executable, "-c", f"{code}#{mark}"]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_until_it_is_itself(self.pid)


@pytest.fixture
def stands() -> Iterator[list[Stand]]:
    made: list[Stand] = []
    yield made
    for each in made:
        with each:
            each.kill()


def log(run: Path, *events: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": time.time(), **event}) + "\n" for event in events)


def known(pid: int, seen: float | None = None, parent: int = 0) -> Known:
    return Known("worker", 0, pid, time.time() if seen is None else seen, parent)


def test_the_processes_of_a_run_follow_from_its_log(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.update()  # there is no log yet
    log(tmp_path, *({"event": "worker_joined", "worker": n, "pid": 40 + n} for n in (1, 0)))
    processes.update()
    assert [(each.number, each.pid) for each in processes.of("worker")] == [(0, 40), (1, 41)]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "event": "process_ended", "worker": 1, "p')
    processes.update()
    assert len(processes.of("worker")) == 2
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('id": 41}\n')
    log(tmp_path, {"event": "master_started", "pid": 7}, {"event": "host_joined", "pid": 8})
    processes.update()
    assert [each.pid for role in ("worker", "master", "host") for each in processes.of(role)] == [
        40, 7, 8,
    ]  # fmt: skip
    log(tmp_path, {"event": "run_started"})
    processes.update()
    assert processes.of("worker") == []


def test_only_the_process_that_was_meant_is_signalled(stands: list[Stand]) -> None:
    stands += [Stand(), Stand(mark="other")]
    ours, foreign = stands
    assert not send(known(ours.pid, seen=time.time() - 60), signal.SIGKILL)  # began after that
    assert not send(known(foreign.pid), signal.SIGKILL)  # no program of ours
    assert not send(known(ours.pid, parent=foreign.pid), signal.SIGKILL)
    assert ours.poll() is foreign.poll() is None
    assert send(known(ours.pid), signal.SIGKILL)
    assert ours.wait(600) == -signal.SIGKILL
    assert not send(known(ours.pid), signal.SIGKILL)


def test_a_process_that_has_ended_and_is_not_waited_for_is_not_there(stands: list[Stand]) -> None:
    stands.append(Stand())
    stands[0].send_signal(signal.SIGKILL)
    while psutil.Process(stands[0].pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not send(known(stands[0].pid), signal.SIGKILL)


def test_loader_processes_are_the_forks_of_a_worker_and_not_what_it_started(
    tmp_path: Path, stands: list[Stand]
) -> None:
    stands.append(Stand(FORKS))
    worker = stands[0]
    assert worker.stdout is not None
    fork, program = map(int, worker.stdout.readline().split())
    log(tmp_path, {"event": "worker_joined", "worker": 3, "pid": worker.pid})
    processes = Processes(tmp_path)
    processes.update()
    assert [(each.number, each.pid) for each in processes.of("loader")] == [(3, fork)]
    assert sorted(processes.alive()) == sorted([worker.pid, fork])
    assert send(processes.of("loader")[0], signal.SIGKILL)
    assert psutil.pid_exists(program)
    psutil.Process(program).kill()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has no name of its own")
def test_a_spare_is_the_fork_of_a_host_with_that_name(tmp_path: Path, stands: list[Stand]) -> None:
    calls_itself = (
        "import os, sys\n"
        "from instep.system.processes import SPARE, name_process\n"
        "worker, spare = os.fork(), os.fork()\n"  # four processes: ours, two forks, a fork's fork
        "assert spare or name_process(SPARE)\n"
        "print(os.getppid(), os.getpid(), flush=True) if worker and not spare else None\n"
        "sys.stdin.read()\n"
    )
    stands.append(Stand(calls_itself))
    host = stands[0]
    assert host.stdout is not None
    parent, spare = map(int, host.stdout.readline().split())
    assert parent == host.pid
    log(tmp_path, {"event": "host_joined", "host": 2, "pid": host.pid})
    processes = Processes(tmp_path)
    processes.update()
    assert [(each.number, each.pid) for each in processes.of("spare")] == [(2, spare)]
    while len(forks := psutil.Process(host.pid).children(recursive=True)) < 3:
        time.sleep(0.01)  # the fork of a fork is yet to come
    for each in forks:
        each.kill()


def test_a_run_has_the_roles_that_its_log_and_its_job_tell_of(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('format = 2\nrecipe = "a.py:f"\n')
    log(tmp_path, {"event": "worker_joined", "worker": 0, "pid": 40})
    assert roles_of(RunFolder(tmp_path)) == ["worker"]
    log(tmp_path, {"event": "master_started", "pid": 7})
    (tmp_path / "job.toml").write_text('format = 2\nrecipe = "a.py:f"\n[data]\nloaders = 2\n')
    assert roles_of(RunFolder(tmp_path)) == ["worker", "master", "loader"]
    log(tmp_path, {"event": "host_joined", "pid": 8})
    spare = ["spare"] if sys.platform == "linux" else []
    assert roles_of(RunFolder(tmp_path)) == ["worker", "master", "host", "loader", *spare]


def test_a_run_whose_loaders_were_not_asked_for_by_number_has_the_role_once_there_are_some(
    tmp_path: Path,
) -> None:
    """As with `loaders = "auto"`, or a DataLoader's `num_workers`."""
    (tmp_path / "job.toml").write_text('format = 2\nrecipe = "a.py:f"\n')
    log(tmp_path, {"event": "worker_joined", "worker": 0, "pid": 40})
    log(tmp_path, {"event": "loaders_started", "worker": 0, "pids": [41, 42]})
    assert roles_of(RunFolder(tmp_path)) == ["worker", "loader"]
