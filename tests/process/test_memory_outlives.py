"""What a worker leaves in memory of its host, through kills of workers and fork servers."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from started import RECIPES, TIMEOUT_S
from test_fork_server import Master

from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Peer
from instep.launch.local import LocalLauncher
from instep.system.memory_files import MemoryFiles
from instep.system.processes import SPARE

pytestmark = [pytest.mark.process, pytest.mark.cold]


class Host:
    """A fork server that does what the test says, as the master."""

    def __init__(self, folder: Path, launcher: LocalLauncher, master: Master) -> None:
        self.folder, self.launcher, self.master = folder, launcher, master
        self.job = f'recipe = "{RECIPES / "remembers.py"}:recipe"\nworkers = 1\n[arguments]\n'
        self.job += f'folder = "{folder}"\n'

    def welcome(self, **fields: object) -> tuple[Peer, int]:
        """Take a process in that calls; where to reach it, and its pid."""
        peer, hello = self.master.wait_for(m.Hello, **fields)
        assert isinstance(hello, m.Hello)
        word = m.Welcome(job=self.job, run=str(self.folder), started=time.time(), recovers=True)
        self.master.board.hub.send(peer, word)
        return peer, hello.pid

    def serve(self) -> None:
        """Start a fork server."""
        self.launcher.start(self.master.board.endpoint, self.folder)
        self.called()

    def called(self) -> None:
        """A fork server calls: the one that was started, or its spare."""
        self.peer, self.server = self.welcome(role="host")

    def work(self, number: int = 0) -> tuple[int, dict[str, object]]:
        """Have a worker forked that remembers; its pid, and what it has found."""
        order = m.StartWorker(number=number, log=str(self.folder / "worker.log"))
        self.master.board.hub.send(self.peer, order)
        self.worker, pid = self.welcome(role="worker", number=number)
        file = self.folder / "found.json"
        deadline = time.monotonic() + TIMEOUT_S
        while not file.exists():
            assert time.monotonic() < deadline, (self.folder / "worker.log").read_text()
            self.master.board.hub.receive(0.02)
        found = json.loads(file.read_text())
        file.unlink()
        return pid, found

    def kill(self, pid: int) -> None:
        """Have the fork server kill a worker, after all that it was told before."""
        self.master.board.hub.send(self.peer, m.Signal(pid=pid, signals=[signal.SIGKILL]))
        self.master.wait_for(m.Exited, pid=pid)

    def end_fork_servers(self) -> None:
        """Kill the one that was started last, and its spare."""
        server = psutil.Process(self.server)
        spare = next(each for each in server.children() if each.name() == SPARE)
        for each in (spare, server):
            each.kill()
        while self.launcher.ended() is None:
            self.master.board.hub.receive(0.02)

    def memory_files(self) -> set[int]:
        """The inode of each memory file of this run that some process has open."""
        name = f"/memfd:{MemoryFiles(0, self.master.board.endpoint.token).name} "
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if str(file.readlink()).startswith(name):
                            found.add(file.stat().st_ino)
        return found


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    launcher, master = LocalLauncher(), Master()
    host = Host(tmp_path, launcher, master)
    try:
        host.serve()
        yield host
        assert host.memory_files()
    finally:
        launcher.stop()
        master.board.close()
    assert host.memory_files() == set()


FIRST = {"outlives": True, "found": []}
SECOND = {"outlives": True, "found": [[1.0]]}
THIRD = {"outlives": True, "found": [[2.0]]}
"""The half that was staged after it is not found."""


def test_the_replacement_of_a_killed_worker_finds_what_that_one_left(host: Host) -> None:
    pid, found = host.work()
    assert found == FIRST
    os.kill(pid, signal.SIGKILL)
    host.master.wait_for(m.Exited, pid=pid)
    pid, found = host.work()
    assert found == SECOND
    for each in (host.server, pid):  # its spare takes its place
        os.kill(each, signal.SIGKILL)
    host.called()
    host.master.wait_for(m.Exited, pid=pid)
    assert host.work()[1] == THIRD
    assert host.work(1)[1] == FIRST


@pytest.mark.slow
def test_a_restarted_fork_server_takes_up_the_memory_of_living_workers(
    host: Host,
) -> None:
    pids = [host.work(number)[0] for number in (0, 1)]
    host.end_fork_servers()
    host.serve()
    workers = list(enumerate(pids))
    host.master.board.hub.send(host.peer, m.Adopt(workers=workers))
    pid, found = host.work()
    assert found == {"outlives": False, "found": []}  # the other one still writes there
    host.kill(pid)
    host.kill(pids[0])
    pid, found = host.work()
    assert found == SECOND
    os.kill(host.server, signal.SIGKILL)  # its spare was forked before it took anything up
    host.called()
    host.kill(pids[1])
    assert host.work(1)[1] == SECOND
    host.kill(pid)
    assert host.work()[1] == THIRD


@pytest.mark.slow
def test_memory_that_was_lost_with_all_who_had_it_is_not_there_and_holds_no_zeros(
    host: Host,
) -> None:
    pid, _ = host.work()
    assert host.memory_files()
    os.kill(pid, signal.SIGKILL)
    host.end_fork_servers()
    host.launcher.stop()
    assert host.memory_files() == set()
    host.serve()
    assert host.work()[1] == FIRST


@pytest.mark.tail
def test_a_released_worker_leaves_no_memory_file(host: Host) -> None:
    host.job += "waits = false\n"
    pid, _ = host.work()
    host.master.wait_for(m.Built)
    host.master.board.hub.send(host.worker, m.Release())
    _, exited = host.master.wait_for(m.Exited, pid=pid)
    assert isinstance(exited, m.Exited)
    assert exited.code == 0
    assert host.work()[1] == FIRST
