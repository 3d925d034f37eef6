"""Each unit is committed once, within the bound, whatever workers do and whenever they die."""

import random

import pytest

from instep.sync.servers.leases import Leases, Unit
from simulation.leases import World, check, play


def test_100_000_clocks_with_pauses_deaths_and_doubled_pushes():
    check(World(0, staleness=2, workers=4, steps=100_000, most=1).run())


@pytest.mark.parametrize("staleness", [0, 1, 2, 7, None])
@pytest.mark.parametrize("workers", [1, 2, 6])
def test_each_unit_counts_once_within_the_bound(staleness, workers):
    check(World(f"{staleness} {workers}", staleness=staleness, workers=workers, steps=1500).run())


def test_a_worker_that_stands_still_blocks_the_others_at_the_bound_and_not_before():
    leases = Leases(lambda step: 2, staleness=2)
    still = leases.lease(0, now=0.0)
    assert still.unit == Unit(1, 0)
    done = []
    while (lease := leases.lease(1, now=1.0)) is not None:
        done.append(lease.unit)
        leases.push(lease.token)
    assert done == [Unit(1, 1), *(Unit(s, n) for s in (2, 3) for n in (0, 1))]
    assert leases.complete == 0
    leases.push(still.token)
    assert leases.complete == 3
    assert leases.lease(1, now=2.0).unit == Unit(4, 0)


def test_without_a_bound_nobody_waits():
    leases = Leases(lambda step: 2, staleness=None)
    leases.lease(0, now=0.0)
    for _ in range(1000):
        lease = leases.lease(1, now=1.0)
        leases.push(lease.token)
    assert leases.begun == 501


def test_an_overdue_lease_is_given_to_another_and_its_push_comes_too_late():
    leases = Leases(lambda step: 1, staleness=0)
    slow = leases.lease(0, now=0.0)
    assert leases.lease(1, now=5.0, limit_s=5.0) is None
    again = leases.lease(1, now=5.1, limit_s=5.0)
    assert again.unit == slow.unit
    assert leases.push(slow.token) is None
    assert leases.push(again.token).version == 1
    assert leases.push(again.token) is None


def test_nothing_is_leased_after_the_step_that_is_to_be_the_last():
    leases = Leases(lambda step: 2, staleness=5)
    leases.stop_after(2)
    leased = [leases.lease(worker, now=0.0) for worker in range(6)]
    assert [lease and lease.unit.step for lease in leased] == [1, 1, 2, 2, None, None]
    assert leases.begun == 2
    leases.leave(1)
    assert leases.lease(9, now=0.0).unit == Unit(1, 1)
    for lease in leased[2:4]:
        leases.push(lease.token)
    leases.stop_after(None)
    assert leases.lease(8, now=0.0).unit == Unit(3, 0)


def test_servers_that_take_over_at_any_time_lease_nothing_that_is_committed():
    """`make simulate` plays 1,500 of these games."""
    assert sum(play(seed).servers for seed in range(150)) > 150


def test_the_guards_of_this_test_can_fail(monkeypatch):
    monkeypatch.setattr(Leases, "may_lease", lambda self, step: step <= self._last)
    with pytest.raises(AssertionError, match="beyond the bound"):
        World(1, staleness=1, workers=5, steps=400).run()


def committed(staleness, part, *, workers=4, units=8, seconds=4000.0, period=50.0):
    """How many units each worker commits, by the clock, if the first is twice as slow for a part
    of each period; others take between 0.9 and 1.1 s for a unit."""
    draw, now = random.Random(5), 0.0
    leases = Leases(lambda step: units, staleness=staleness)
    counts, ends, waiting = [0] * workers, {}, set(range(workers))
    while now < seconds:
        for worker in sorted(waiting):
            lease = leases.lease(worker, now)
            if lease is None:
                break
            slow = worker == 0 and now % period < part * period
            ends[worker] = now + draw.uniform(0.9, 1.1) * (2.0 if slow else 1.0), lease
            waiting.discard(worker)
        worker = min(ends, key=ends.get)
        now, lease = ends.pop(worker)
        assert leases.push(lease.token) is not None
        counts[worker] += 1
        waiting.add(worker)
    return counts


@pytest.mark.parametrize("staleness", [2, None])
def test_a_worker_that_is_slow_now_and_then_costs_no_time_but_its_own(staleness):
    """If all waited for one that is twice as slow for a tenth of the time, 0.95 would be left."""
    slow, alone = committed(staleness, 0.1), committed(staleness, 0.0)
    assert sum(slow) / sum(alone) == pytest.approx(1 - 0.1 / 2 / 4, abs=0.003)
    assert sum(slow[1:]) / sum(alone[1:]) > 0.997


def test_where_units_wait_for_each_other_at_every_step_all_wait_for_the_slow_one():
    slow, alone = (sum(committed(0, part, units=4)) for part in (1.0, 0.0))
    assert slow / alone < 0.75
