"""What one thread can learn of another."""

import threading
import time
from contextlib import closing

import pytest

from instep.data.reading.fetch import Slice
from instep.data.reading.readers import Ahead
from instep.data.reading.threads import cpu_clock

TIMEOUT_S = 600.0

pytestmark = pytest.mark.skipif(
    not hasattr(time, "pthread_getcpuclockid"), reason="the system does not tell"
)


class Doing:
    """A thread that loops or waits, and its clock."""

    def __init__(self, *, loops):
        self.ended, self.clock, ready = threading.Event(), None, threading.Event()

        def do():
            self.clock = cpu_clock()
            ready.set()
            while loops and not self.ended.is_set():
                pass
            self.ended.wait()

        self.thread = threading.Thread(target=do, daemon=True)
        self.thread.start()
        assert ready.wait(TIMEOUT_S)

    def end(self):
        self.ended.set()
        self.thread.join()


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_clock_of_a_looping_thread_advances_and_that_of_a_waiting_one_does_not():
    loops, waits = Doing(loops=True), Doing(loops=False)
    until(lambda: loops.clock() > 0.3)
    assert waits.clock() < 0.1
    loops.end()
    waits.end()


def test_the_clock_of_a_thread_that_has_ended_is_zero():
    done = Doing(loops=False)
    done.end()
    until(lambda: done.clock() == 0.0)  # the kernel may need a moment


def test_a_reader_reports_the_cpu_time_of_its_thread():
    ended = threading.Event()

    def work(part):
        """Later slices take as long as it takes."""
        while part.first and not ended.is_set():
            pass
        return part

    with closing(Ahead(work)) as reader:
        first, second = reader.submit(Slice(0, 0, 1)), reader.submit(Slice(0, 1, 2))
        assert reader.take(first) == Slice(0, 0, 1)
        until(lambda: reader.cpu_s > 0.3)
        ended.set()
        assert reader.take(second) == Slice(0, 1, 2)
