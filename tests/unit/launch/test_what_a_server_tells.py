"""What a fork server tells of its processes, to whom and in which order."""

import errno
import os
import signal
from contextlib import contextmanager

import pytest

from instep import process
from instep.comm.protocol.channel import Address
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import Adopt, Emit, Exited, StartWorker, Whereabouts
from instep.data.samples import last_read
from instep.launch import forking, spare
from instep.launch.forking import Server
from instep.system.processes import wait_readable

SEAT = Endpoint(Address("127.0.0.1", 1), "token", 0)


class MasterConnection:
    """Keeps what was said, and what the spare had been told by then."""

    def __init__(self):
        self.said, self.pipe, self.orders = [], -1, []
        self.inbox = self

    def send(self, message):
        self.said.append((message, bool(wait_readable([self.pipe], 0))))

    def poll(self):
        return self.orders.pop(0) if self.orders else None

    def close(self):
        pass


@pytest.fixture
def served():
    """A server that has a spare, as far as it knows: what it tells that one can be read."""
    connection = MasterConnection()
    server = Server(connection, SEAT, {})
    connection.pipe, server._spare._life = os.pipe()
    yield server, connection
    for end in (connection.pipe, server._spare._life, server._wake_read, server._wake_write):
        os.close(end)
    server._memory_files.keep_only(0, -1)


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
    server, connection = served
    with child() as pid:
        if adopted:
            connection.orders.append(Adopt(workers=[(3, pid)]))
            server._receive()
            os.read(connection.pipe, 4096)
        else:
            server._workers[pid] = 3
        ended(pid)
        server._watch_adopted() if adopted else server._reap()
    code = None if adopted else -signal.SIGKILL
    assert connection.said == [(Exited(number=3, pid=pid, code=code), False)]
    assert os.read(connection.pipe, 4096) == spare._WORKER.pack(pid, spare._GONE)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="handles of Linux")
def test_a_spare_has_handles_of_the_workers_as_soon_as_its_server_has_ended():
    with child() as pid, child() as gone:
        read, write = os.pipe()  # after the forks, which would keep it open
        for told in ((gone, 2), (pid, 3), (gone, spare._GONE)):
            os.write(write, spare._WORKER.pack(*told))
        os.close(write)
        left = spare._wait_for_end(read, pid)
        os.close(read)
        [(number, process)] = left.values()
        assert (list(left), number, process.ended) == ([pid], 3, False)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # from here on the number may be another's
        assert process._handle >= 0
        assert process.ended
        process.close()


def test_a_server_that_cannot_fork_forgets_the_spare_that_it_had(served, monkeypatch):
    server, connection = served
    with child() as pid:
        server._spare.pid = pid

        def full():
            raise BlockingIOError

        ended(pid)
        monkeypatch.setattr(os, "fork", full)
        server._reap()
        assert server._spare.pid == 0
        server._kill_all()
    assert connection.said == []


class Full:
    """A system that has no room for another process, so many times."""

    def __init__(self, times):
        self.times, self.fork, self.now = times, os.fork, 100.0

    def __call__(self):
        self.times -= 1
        if self.times >= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return 4711  # as the parent sees it

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("times", [3, len(forking.PAUSES_S) + 1])
def test_a_fork_that_fails_is_tried_again_with_growing_pauses_and_said(served, monkeypatch, times):
    server, connection = served
    full = Full(times)
    monkeypatch.setattr(os, "fork", full)
    monkeypatch.setattr(forking.time, "monotonic", full.monotonic)
    connection.orders.append(StartWorker(number=3, log="log"))
    server._receive()
    pauses = []
    while server._retries:
        before = full.times
        server._retry_forks()
        assert full.times == before  # not before its time
        pauses.append(server._retries[3].due - full.now)
        full.now += pauses[-1]
        server._retry_forks()
    assert pauses == pytest.approx(forking.PAUSES_S[: len(pauses)])
    words = [message for message, _ in connection.said if isinstance(message, Emit)]
    assert len(words) == len(pauses)
    assert "worker 3 could not be forked (Resource temporarily unavailable)" in str(words[0])
    assert "tried again in 0.1 s" in str(words[0])
    ends = [message for message, _ in connection.said if isinstance(message, Exited)]
    if times == 3:
        assert (ends, server._workers) == ([], {4711: 3})
        server._workers.clear()
        return
    (end,) = ends
    assert (end.number, end.pid) == (3, 0)
    assert "tried 10 times" in end.error


def test_where_a_process_ended_is_told_with_its_end(served):
    server, connection = served
    page = server._pages.free()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        last_read.use_page(page)
        last_read.set_step(7)
        last_read.current_read("training").start_named(512, "a/b.png")
        os.write(write, b".")
        signal.pause()
    server._pages.assign(page, pid)
    server._workers[pid] = 3
    os.read(read, 1)
    ended(pid)
    server._reap()
    [(end, _)] = connection.said
    assert end.place == Whereabouts(step=7, dataset="training", sample=512, file="a/b.png")
    assert server._pages.collect(pid) is None  # it is told once, and the page is another's
    for one in (read, write):
        os.close(one)


def test_a_worker_is_told_its_number_among_those_of_its_host(served, monkeypatch, tmp_path):
    server, _ = served
    told, tells = os.pipe()

    def main(endpoint, number, local_rank, phases):
        os.write(tells, bytes([number, local_rank]))
        signal.pause()

    def start(number):
        server._fork(StartWorker(number=number, log=str(tmp_path / "log")))
        return tuple(os.read(told, 2))

    monkeypatch.setattr(process, "main", main)
    try:
        assert [start(number) for number in (1, 3, 5)] == [(1, 0), (3, 1), (5, 2)]
        ended(next(pid for pid, number in server._workers.items() if number == 3))
        server._reap()
        assert start(7) == (7, 1)
        for pid in list(server._workers):
            ended(pid)
        server._reap()
    finally:
        os.close(told)
        os.close(tells)
