"""What a fork server tells of its processes, to whom and in which order."""

import os
import select
import signal
from contextlib import contextmanager

import pytest

from instep.comm.channel import Address
from instep.comm.messages import Adopt, Exited
from instep.run.launch import fork_server
from instep.run.launch.base import Seat
from instep.run.launch.fork_server import Server

SEAT = Seat(Address("127.0.0.1", 1), "token", 0)


class Tie:
    """Keeps what was said, and what the spare had been told by then."""

    def __init__(self):
        self.said, self.pipe, self.orders = [], -1, []

    def send(self, message):
        self.said.append((message, bool(select.select([self.pipe], [], [], 0)[0])))

    def poll(self):
        return self.orders.pop(0) if self.orders else None


@pytest.fixture
def served():
    """A server that has a spare, as far as it knows: what it tells that one can be read."""
    tie = Tie()
    server = Server(tie, SEAT, {})
    tie.pipe, server._life = os.pipe()
    yield server, tie
    for end in (tie.pipe, server._life, server._wake_read, server._wake_write):
        os.close(end)


@contextmanager
def child():
    """A process that waits until it is killed."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # the test has done it


def ended(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the server is to reap it


@pytest.mark.parametrize("adopted", [False, True])
def test_the_master_hears_of_an_end_before_the_spare_forgets_the_worker(served, adopted):
    server, tie = served
    with child() as pid:
        if adopted:
            tie.orders.append(Adopt(workers=[(3, pid)]))
            server._obey()
            os.read(tie.pipe, 4096)
        else:
            server._workers[pid] = 3
        ended(pid)
        server._look_after_adopted() if adopted else server._reap()
    code = None if adopted else -signal.SIGKILL
    assert tie.said == [(Exited(number=3, pid=pid, code=code), False)]
    assert os.read(tie.pipe, 4096) == fork_server._WORKER.pack(pid, fork_server._GONE)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="handles of Linux")
def test_a_spare_has_handles_of_the_workers_as_soon_as_its_server_has_ended():
    with child() as pid, child() as gone:
        read, write = os.pipe()  # after the forks, which would keep it open
        for told in ((gone, 2), (pid, 3), (gone, fork_server._GONE)):
            os.write(write, fork_server._WORKER.pack(*told))
        os.close(write)
        left = fork_server._hear_of_workers(read, pid)
        os.close(read)
        [(number, process)] = left.values()
        assert (list(left), number, process.ended) == ([pid], 3, False)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # from here on the number may be another's
        assert process._handle >= 0
        assert process.ended
        process.close()


def test_a_server_that_cannot_fork_forgets_the_spare_that_it_had(served, monkeypatch):
    server, tie = served
    with child() as pid:
        server._spare = pid

        def full():
            raise BlockingIOError

        ended(pid)
        monkeypatch.setattr(os, "fork", full)
        server._reap()
        assert server._spare == 0
        server._kill_all()
    assert tie.said == []
