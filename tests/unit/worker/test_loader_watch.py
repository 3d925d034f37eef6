"""Which loader processes are ended, told from what the system shows of them, on a turned clock."""

import os
import signal
import time
from itertools import pairwise

import pytest

from instep.data.loader import Read
from instep.system.limits import FLOOR_S, STEPS, UNKNOWN_S
from instep.worker.passes.activity import Activity
from instep.worker.reading.loader_watch import ENOUGH_S, LoaderWatch, Seen, end, seen

BEAT_S = 0.2


class Loaders:
    """One process that reads, as the system shows it."""

    def __init__(self):
        self.now, self.cpu_s, self.stopped, self.ended, self.reads = 100.0, 0.0, False, [], 0
        self.runs = True
        self.watch = LoaderWatch(lambda pid: Seen(self.stopped, self.runs, self.cpu_s), self.ends)
        self.gets_one()

    def ends(self, pid):
        self.ended.append(self.now)

    def gets_one(self):
        self.reads += 1
        self.turn(0.0)

    def turn(self, share, known=True, waits=True):
        self.now += BEAT_S
        self.cpu_s += share * BEAT_S
        self.watch.turn(self.now, [7], at=(self.reads,), waits=waits, known=known)

    def waits(self, seconds, share=1.0, known=True):
        """How long after its begin each one was ended that the worker waited for."""
        began, self.ended = self.now, []
        for _ in range(round(seconds / BEAT_S)):
            self.turn(share, known)
        times = [began, *self.ended]
        return [b - a for a, b in pairwise(times)]


def test_a_read_that_loops_is_ended_soon_then_has_half_a_minute_and_then_no_more():
    first, second, *rest = Loaders().waits(45.0)
    assert FLOOR_S < first < FLOOR_S + 2 * BEAT_S
    assert ENOUGH_S < second < ENOUGH_S + 2 * BEAT_S < UNKNOWN_S
    assert len(rest) > 2
    assert max(rest) < FLOOR_S + 2 * BEAT_S


def test_the_longest_read_so_far_is_learnt():
    loaders = Loaders()
    assert loaders.waits(1.0) == []
    loaders.gets_one()
    (loop_s,) = loaders.waits(6.0)
    assert STEPS * 1.0 < loop_s < STEPS * 1.0 + 5 * BEAT_S


def test_before_any_read_has_ended_it_may_take_half_a_minute():
    loaders = Loaders()
    assert loaders.waits(ENOUGH_S - 1.0, known=False) == []
    assert len(loaders.waits(2.0, known=False)) == 1


def test_a_read_that_waits_for_a_disk_is_left_to_others():
    loaders = Loaders()
    loaders.runs = False
    assert loaders.waits(2 * UNKNOWN_S, share=0.1) == []


def test_a_loop_is_found_though_others_use_the_processors():
    loop_s, *_ = Loaders().waits(2.0, share=0.1)
    assert loop_s < FLOOR_S + 2 * BEAT_S


def test_nobody_is_ended_for_whom_nobody_waits():
    loaders = Loaders()
    for _ in range(200):
        loaders.turn(1.0, waits=False)
    assert loaders.ended == []


def test_one_that_was_stopped_is_ended_soon_each_time():
    loaders = Loaders()
    loaders.stopped = True
    first, second, *_ = loaders.waits(5.0, share=0.0)
    assert FLOOR_S < first < FLOOR_S + 3 * BEAT_S
    assert FLOOR_S < second < FLOOR_S + 3 * BEAT_S


@pytest.mark.process
def test_what_the_system_tells_of_a_process():
    pid = os.fork()
    if not pid:
        while True:
            pass
    try:
        deadline = time.monotonic() + 600
        while seen(pid).cpu_s < 0.1:
            assert time.monotonic() < deadline
        assert (seen(pid).stopped, seen(pid).runs) == (False, True)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert seen(pid).stopped
    finally:
        end(pid)
        os.waitpid(pid, 0)
    assert seen(pid) is None
    end(pid)


def test_whoever_waits_for_a_read_in_a_pass_of_several_processes_is_loading():
    activity, seen = Activity(), []
    activity.enter("forward")

    def reads():
        for _ in range(2):
            seen.append(activity.phase)
            yield Read(None, 0)

    for _ in activity.loading(reads()):
        seen.append(activity.phase)
    assert seen == ["loading", "forward"] * 2
    assert activity.phase == "forward"
