"""A fork server that is killed: its spare knows whom it had forked, whatever the master says.

It is one of several hosts here, which say now and then that they live, and who was stopped.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from started import RECIPES, TIMEOUT_S

from instep.comm import messages as m
from instep.comm.channel import LARGEST, Peer
from instep.comm.endpoint import Switchboard
from instep.launch.local import LocalLauncher

pytestmark = pytest.mark.process


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
        raise AssertionError(f"no {kind.__name__} with {fields}")


def test_the_spare_of_a_killed_server_signals_its_workers_and_reports_their_exits(
    tmp_path: Path,
) -> None:
    master, launcher = Master(), LocalLauncher()
    (tmp_path / "logs").mkdir()
    try:
        launcher.start(master.board.endpoint, tmp_path / "logs")
        peer, hello = master.wait_for(m.Hello, role="host")
        job = f'recipe = "{RECIPES / "tiny.py"}:recipe"\n[launch]\nhosts = ["here", "there"]\n'
        welcome = m.Welcome(job=job, run=str(tmp_path), started=time.time())
        master.board.hub.send(peer, welcome)
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
