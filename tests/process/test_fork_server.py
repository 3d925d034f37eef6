"""A fork server that is killed: its spare knows whom it had forked, whatever the master says.

It is one of several hosts here, which say now and then that they live, and who was stopped.
"""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from started import RECIPES, TIMEOUT_S, Start

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import LARGEST
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.launch.local import LocalLauncher
from instep.system.environment import SCHEDULERS
from marks import slow

pytestmark = [pytest.mark.process, pytest.mark.cold]


class Master:
    """What a fork server hears is what the test says."""

    def __init__(self) -> None:
        self.board = Switchboard()
        self.heard: list[tuple[Peer, m.AnyMessage]] = []

    def wait_for(self, kind: type[m.AnyMessage], **fields: object) -> tuple[Peer, m.AnyMessage]:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for place, (peer, message) in enumerate(self.heard):
                if isinstance(message, kind) and all(
                    getattr(message, key) == value for key, value in fields.items()
                ):
                    del self.heard[place]
                    return peer, message
            for peer, message in self.board.hub.receive(0.1):
                if message is not None:
                    peer.frames.largest = LARGEST
                    self.heard.append((peer, message))
                if isinstance(message, m.Heartbeat):  # else its lease expires, and it connects anew
                    self.board.hub.send(peer, m.Ack(count=0, heartbeat=message.number))
        raise AssertionError(f"no {kind.__name__} with {fields}")


def begin(launcher: LocalLauncher, master: Master, run: Path) -> tuple[Peer, m.Hello, m.Welcome]:
    """A fork server of a run on several hosts; its spare will need the welcome too."""
    (run / "logs").mkdir()
    launcher.start(master.board.endpoint, run / "logs")
    peer, hello = master.wait_for(m.Hello, role="host")
    assert isinstance(hello, m.Hello)
    job = f'recipe = "{RECIPES / "tiny.py"}:recipe"\n[launch]\nhosts = ["here", "there"]\n'
    welcome = m.Welcome(job=job, run=str(run), started=time.time())
    master.board.hub.send(peer, welcome)
    return peer, hello, welcome


def test_the_spare_of_a_killed_server_signals_its_workers_and_reports_their_exits(
    tmp_path: Path,
) -> None:
    master, launcher = Master(), LocalLauncher()
    try:
        peer, hello, welcome = begin(launcher, master, tmp_path)
        pids = []
        for number in (0, 1):
            log = str(tmp_path / "logs" / f"worker-{number}.log")
            master.board.hub.send(peer, m.StartWorker(number=number, log=log))
            _, worker = master.wait_for(m.Hello, role="worker", number=number)
            pids.append(worker.pid)
        master.board.hub.send(peer, m.Signal(pid=pids[0], signals=[signal.SIGKILL]))
        master.wait_for(m.Exited, pid=pids[0])
        os.kill(hello.pid, signal.SIGKILL)
        spare, again = master.wait_for(m.Hello, role="host")
        assert again.pid != hello.pid
        master.board.hub.send(spare, welcome)
        os.kill(pids[1], signal.SIGSTOP)
        master.wait_for(m.Heartbeat, stopped=[pids[1]])
        master.board.hub.send(spare, m.Signal(pid=pids[1], signals=[signal.SIGKILL]))
        _, exited = master.wait_for(m.Exited, pid=pids[1])  # the other end may be told twice
        assert (exited.number, exited.pid) == (1, pids[1])
    finally:
        launcher.stop()
        master.board.close()


STARTER = """
import sys, time
from pathlib import Path
from instep.comm.protocol.channel import Address
from instep.comm.protocol.endpoint import Endpoint
from instep.launch.local import LocalLauncher

launcher = LocalLauncher(lifeline=True)
launcher.start(Endpoint(Address(sys.argv[1], int(sys.argv[2])), sys.argv[3]), Path(sys.argv[4]))
time.sleep(600)
"""


@pytest.mark.parametrize("first", ["the server", slow("a stopped one"), slow("the starter")])
def test_on_a_lifeline_all_end_with_the_process_that_started_them_though_the_master_lives(
    tmp_path: Path, start: Start, first: str
) -> None:
    master = Master()
    (tmp_path / "logs").mkdir()
    at = master.board.endpoint
    starter = start("-c", STARTER, at.address.host, at.address.port, at.token, tmp_path / "logs")
    try:
        peer, hello = master.wait_for(m.Hello, role="host")
        job = f'recipe = "{RECIPES / "tiny.py"}:recipe"\n[launch]\nhosts = ["here", "there"]\n'
        welcome = m.Welcome(job=job, run=str(tmp_path), started=time.time())
        master.board.hub.send(peer, welcome)
        log = str(tmp_path / "logs" / "worker-0.log")
        master.board.hub.send(peer, m.StartWorker(number=0, log=log))
        master.wait_for(m.Hello, role="worker", number=0)
        if first == "the server":
            os.kill(hello.pid, signal.SIGKILL)
            spare, _ = master.wait_for(m.Hello, role="host")
            master.board.hub.send(spare, welcome)
            master.wait_for(m.Heartbeat, stopped=[])
        elif first == "a stopped one":
            os.kill(hello.pid, signal.SIGSTOP)
        assert len(starter.processes()) >= 3  # starter, server and worker; and the spare
        starter.process.kill()
        starter.process.wait()
        starter.check_no_process_is_left()
    finally:
        master.board.close()


@pytest.mark.parametrize("sent", SCHEDULERS)
def test_a_signal_before_a_time_limit_ends_no_process_of_a_host(tmp_path: Path, sent: int) -> None:
    """Slurm sends it to every process of a step, if it is not told to signal the script alone."""
    master, launcher = Master(), LocalLauncher()
    try:
        peer, hello, welcome = begin(launcher, master, tmp_path)
        log = str(tmp_path / "logs" / "worker-0.log")
        master.board.hub.send(peer, m.StartWorker(number=0, log=log))
        _, worker = master.wait_for(m.Hello, role="worker", number=0)
        spare = {each.pid for each in psutil.Process(hello.pid).children()} - {worker.pid}
        for pid in (worker.pid, *spare, hello.pid):
            os.kill(pid, sent)
        master.board.hub.send(peer, m.StartWorker(number=1, log=log))
        master.wait_for(m.Hello, role="worker", number=1)
        assert not any(isinstance(message, m.Exited) for _, message in master.heard)
        os.kill(hello.pid, signal.SIGKILL)
        there, again = master.wait_for(m.Hello, role="host")  # its spare was there
        assert {again.pid} == spare
        master.board.hub.send(there, welcome)
        master.board.hub.send(there, m.Signal(pid=worker.pid, signals=[signal.SIGKILL]))
        master.wait_for(m.Exited, pid=worker.pid)
    finally:
        launcher.stop()
        master.board.close()
