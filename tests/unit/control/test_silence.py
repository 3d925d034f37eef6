"""When a silent worker that cannot be replaced ends a run."""

import pytest

from instep.comm.protocol.messages import Heartbeat
from instep.control.seen import Silent
from instep.control.watch import ALL_SILENT_S, SILENT_S, Watch
from instep.system.limits import FLOOR_S

BEAT_S = 0.2


class Clock:
    """Time that passes for workers, of which some send heartbeats."""

    def __init__(self, workers=3):
        self.now, self.watch, self.workers = 100.0, Watch(), set(range(workers))
        for worker in self.workers:
            self.watch.begins(worker, self.now)

    def look(self):
        self.watch.turn(self.now)
        return self.watch.silent(self.now)

    def passes(self, seconds, silent=()):
        """Let time pass in which these are silent; returns the first that was so for too long."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for worker in self.workers - set(silent):
                self.watch.heartbeat(worker, Heartbeat(phase="exchange"), self.now)
            if found := self.look():
                return found
        return None


def test_a_worker_that_is_silent_alone_is_named_after_a_minute():
    clock = Clock()
    assert clock.passes(SILENT_S, [1]) is None
    found = clock.passes(3, [1])
    assert (found.worker, found.all) == (1, False)
    assert SILENT_S < found.seconds < SILENT_S + FLOOR_S + 1


def test_of_several_silent_workers_the_first_is_named():
    clock = Clock()
    clock.passes(5, [2])
    assert clock.passes(2 * SILENT_S, [1, 2]).worker == 2


def test_less_than_a_minute_of_silence_ends_nothing():
    clock = Clock()
    for _ in range(5):
        assert clock.passes(SILENT_S - 1, [0]) is None
        assert clock.passes(1) is None


def test_all_workers_may_be_silent_for_ten_minutes_and_wake_one_by_one():
    clock = Clock()
    assert clock.passes(ALL_SILENT_S - 5, [0, 1, 2]) is None
    assert clock.passes(SILENT_S - 5, [0, 1]) is None  # 2 wakes up, the others much later
    assert clock.passes(60) is None
    assert clock.passes(ALL_SILENT_S, [0, 1, 2]) is None
    found = clock.passes(5, [0, 1, 2])
    assert (found.worker, found.all) == (0, True)


def test_time_in_which_the_watchdog_did_not_run_does_not_count():
    """The machine slept, or whoever looks on was stopped with all others."""
    clock = Clock()
    clock.now += 10 * ALL_SILENT_S
    assert clock.look() is None
    assert clock.passes(30, [1]) is None
    clock.now += 10 * ALL_SILENT_S
    assert clock.passes(25, [1]) is None


def test_a_worker_that_has_left_is_not_expected_to_send_heartbeats():
    clock = Clock()
    clock.passes(30, [1])
    clock.watch.leaves(1)
    clock.workers.remove(1)
    assert clock.passes(2 * SILENT_S) is None


@pytest.mark.parametrize(
    ("silent", "facts", "said"),
    [
        (
            Silent(1, 61.3, all=False),
            {"pid": 7, "node": "node4", "stopped": True, "joined": True},
            "its process (pid 7 on node4) gave no sign of life for 1m01s while others did: it "
            "was stopped (SIGSTOP, Ctrl-Z). It cannot be replaced under instep.join.",
        ),
        (
            Silent(0, 600.5, all=True),
            {"pid": 0, "node": "", "stopped": False, "joined": False},
            "its process gave no sign of life for 10m00s, nor did any other worker: it may be "
            "stopped, or native code keeps the interpreter's lock. It cannot be replaced on "
            "GPUs.",
        ),
    ],
)
def test_the_cause_says_where_how_long_and_why_it_cannot_be_replaced(silent, facts, said):
    assert silent.cause(**facts) == said
