"""Who is silent for too long, told by the clock and by what the system says of a process."""

import os

import pytest

from instep.system.lease import (
    FIRST_SIGN_S,
    HUNG_S,
    MOST_S,
    MOVED_BYTES,
    NO_WATCHDOG,
    Facts,
    Lease,
    SignsOfLife,
    facts_of,
)
from instep.system.limits import FLOOR_S, LOOK_S, STEPS

LOOKS_S = 0.05


class Watched:
    """A process that is looked at twenty times a second, and what the system tells of it."""

    def __init__(self, *, signs=1, **options):
        self.now, self.facts = 100.0, Facts()
        self.lease = Lease(77, self.now, look=lambda pid: self.facts, **options)
        for _ in range(signs):
            self.lease.renew(self.now)

    def passes(self, seconds, each_s=LOOKS_S, **changes):
        """Let time pass, in which some facts grow by so much a second; how it hangs, if it does."""
        for _ in range(round(seconds / each_s)):
            self.now += each_s
            grown = {k: getattr(self.facts, k) + rate * each_s for k, rate in changes.items()}
            self.facts = self.facts._replace(**grown)
            if how := self.lease.turn(self.now):
                return how
        return ""


def test_one_that_was_stopped_is_found_soon():
    one = Watched()
    one.facts = Facts(stopped=True)
    assert one.passes(FLOOR_S) == ""
    assert one.passes(0.5).startswith("it was stopped for 1.")


def test_one_that_was_stopped_for_a_moment_is_not():
    one = Watched()
    for _ in range(5):
        one.facts = Facts(stopped=True)
        assert one.passes(FLOOR_S) == ""
        one.facts = Facts()
        assert one.passes(0.1) == ""
    one.lease.renew(one.now)
    assert one.passes(HUNG_S - 0.2) == ""


def test_one_that_runs_and_says_nothing_is_found_later():
    one = Watched()
    assert one.passes(HUNG_S - 0.1, cpu_s=1.0) == ""
    assert one.passes(0.3, cpu_s=1.0).startswith("it gave no sign of life for 10.")


def test_each_sign_renews_the_lease():
    one = Watched()
    for _ in range(4):
        assert one.passes(HUNG_S - 0.5) == ""
        one.lease.renew(one.now)


def test_the_first_sign_may_take_long():
    one = Watched(signs=0)
    assert one.passes(FIRST_SIGN_S - 0.2) == ""
    assert one.passes(0.5) != ""
    assert Watched(signs=0, first_s=1000.0).passes(999.0) == ""


def test_time_without_a_processor_does_not_count():
    one = Watched()
    assert one.passes(5 * HUNG_S, waited_s=0.9, cpu_s=0.1) == ""
    other = Watched()
    other.facts = Facts(starved=True, cpu_s=3.0)  # it has not been let at one at all
    assert other.passes(5 * HUNG_S) == ""
    assert other.passes(HUNG_S + 1, cpu_s=0.5) != ""  # half the time is its own


def test_one_that_reads_or_writes_gets_something_done():
    one = Watched()
    assert one.passes(5 * HUNG_S, moved_bytes=2 * MOVED_BYTES / LOOKS_S) == ""
    assert one.passes(HUNG_S + 0.3, moved_bytes=0.1 * MOVED_BYTES / LOOKS_S) != ""


def test_nobody_is_blamed_by_one_that_was_away_itself():
    one = Watched()
    one.now += 3600.0
    assert one.lease.turn(one.now) == ""
    assert one.passes(HUNG_S / 2) == ""
    assert one.passes(HUNG_S, each_s=4 * LOOK_S) == ""  # it looks rarely


def test_what_it_came_out_of_once_it_is_given_again():
    one = Watched()
    one.facts = Facts(cpu_s=1.0)
    assert one.passes(8.0) == ""
    one.lease.renew(one.now)
    assert one.lease.longest_s == pytest.approx(8.0)
    assert one.passes(STEPS * 8.0 - 0.2) == ""
    assert one.passes(0.5) != ""
    another = Watched(longest_s=one.lease.longest_s)  # its successor
    assert another.passes(STEPS * 8.0 - 0.2) == ""


def test_each_loss_in_a_row_doubles_the_time_up_to_a_bound():
    assert Watched(times=1).passes(2 * HUNG_S - 0.2) == ""
    assert Watched(times=1).passes(2 * HUNG_S + 0.3) != ""
    assert Watched(times=20, longest_s=1e6).passes(MOST_S + 0.3) != ""


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux tells")
def test_the_system_tells_of_this_very_process():
    before = facts_of(os.getpid())
    sum(range(300_000))
    with open(__file__, "rb") as file:
        size = len(file.read())
    after = facts_of(os.getpid())
    assert not after.stopped
    assert after.cpu_s > before.cpu_s
    assert after.waited_s >= before.waited_s
    assert after.moved_bytes - before.moved_bytes >= size
    assert facts_of(0x7FFFFFFF) == Facts()


def test_signs_are_seen_and_never_waited_for():
    read, write = os.pipe()
    try:
        signs = SignsOfLife(write)
        for _ in range(100_000):  # more than a pipe takes
            signs.show()
        assert set(os.read(read, 1 << 20)) == {ord(".")}
        NO_WATCHDOG.show()
    finally:
        os.close(read)
    with pytest.raises(BrokenPipeError):
        signs.show()
    os.close(write)
