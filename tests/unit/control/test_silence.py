"""Who ends a run by giving no sign of life, told by the clock alone."""

import pytest

from instep.control.silence import ALL_SILENT_S, LIVES_S, SILENT_S, Silence, Silent

BEAT_S = 0.2


class Clock:
    """Time that passes for workers, of which some show that they live."""

    def __init__(self, workers=3):
        self.now, self.silence, self.workers = 100.0, Silence(), set(range(workers))
        self.hear(self.workers)

    def hear(self, workers):
        for worker in workers:
            self.silence.hears(worker, self.now)

    def passes(self, seconds, silent=(), each_s=BEAT_S):
        """Let time pass in which these are silent; who was so for too long, if anybody was."""
        for _ in range(round(seconds / each_s)):
            self.now += each_s
            self.hear(self.workers - set(silent))
            if found := self.silence.turn(self.now):
                return found
        return None


def test_one_that_is_silent_while_others_live_is_named_after_a_minute():
    clock = Clock()
    assert clock.passes(SILENT_S, [1]) is None
    found = clock.passes(3, [1])
    assert (found.worker, found.all) == (1, False)
    assert SILENT_S < found.seconds < SILENT_S + LIVES_S + 1


def test_of_several_the_one_that_fell_silent_first_is_named():
    clock = Clock()
    clock.passes(5, [2])
    assert clock.passes(2 * SILENT_S, [1, 2]).worker == 2


def test_a_call_that_holds_the_interpreter_for_less_than_a_minute_ends_nothing():
    clock = Clock()
    for _ in range(5):
        assert clock.passes(SILENT_S - 1, [0]) is None
        assert clock.passes(1) is None


def test_all_are_waited_for_for_ten_minutes_and_whoever_wakes_first_ends_nothing():
    clock = Clock()
    assert clock.passes(ALL_SILENT_S - 5, [0, 1, 2]) is None
    assert clock.passes(SILENT_S - 5, [0, 1]) is None  # 2 wakes up, the others much later
    assert clock.passes(60) is None
    assert clock.passes(ALL_SILENT_S, [0, 1, 2]) is None
    found = clock.passes(5, [0, 1, 2])
    assert (found.worker, found.all) == (0, True)


def test_time_that_nobody_saw_pass_does_not_count():
    """The machine slept, or whoever looks on was stopped with all others."""
    clock = Clock()
    clock.now += 10 * ALL_SILENT_S
    assert clock.silence.turn(clock.now) is None
    assert clock.passes(30, [1]) is None
    clock.now += 10 * ALL_SILENT_S
    assert clock.passes(25, [1]) is None


def test_one_that_has_left_is_not_waited_for():
    clock = Clock()
    clock.passes(30, [1])
    clock.silence.leaves(1)
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
def test_what_is_said_of_it(silent, facts, said):
    assert silent.cause(**facts) == said
