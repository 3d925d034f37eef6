"""Who computes which unit where no step waits for all workers: leases, their bound, their order.

A server gives each worker one unit of work (`Unit`: a micro-batch of a step) at a time, under a
*lease*. A push that shows the token of a lease that counts is a commit, and gets the next number.
Any other push changes nothing: a second one of the same lease, or one whose lease was given to
another worker meanwhile. So each unit is committed once.

The bound is on steps of the data, not on workers: a unit of step t is leased only when all units of
steps up to t - staleness - 1 are committed. Workers may come, go and be slow without a rule for
them. Units are leased in their order, so what holds up the others is always leased first.

Pure: no clock, tensor or connection is known here. Way in: `Leases.lease` and `Leases.push`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Unit(NamedTuple):
    """A micro-batch of a step; tuples order them."""

    step: int
    """Counts from 1."""
    number: int
    """Within the step, from 0."""


class UnitLease(NamedTuple):
    """The right of one worker to commit one unit."""

    token: int
    """Differs from that of every other lease."""
    unit: Unit
    worker: int
    version: int
    """The number of the last commit when it was given: its worker gets those parameters."""
    since: float
    """When it was given."""


class Committed(NamedTuple):
    """A push that counts."""

    version: int
    """Its number among all commits, from 1."""
    lease: UnitLease
    lag: int
    """Commits between the parameters that it was computed with and those that it moves."""


class Leases:
    """All units of a run: committed, leased, or still to come.

    Args:
        units: how many units a step has, 1 or more.
        staleness: how many steps a unit may be ahead of the first step that is not complete,
            not counting that one; None for no bound.
        step: all units up to this step are committed.
        beyond: units of later steps that are committed too.
        version: how many commits there were.
        first_token: of the first lease; none of an earlier server may be as high.
    """

    def __init__(
        self,
        units: Callable[[int], int],
        *,
        staleness: int | None,
        step: int = 0,
        beyond: Iterable[Unit] = (),
        version: int = 0,
        first_token: int = 1,
    ) -> None:
        self._units, self._staleness = units, staleness
        self.complete = step
        """The last step of which, as of all before it, every unit is committed."""
        self.version = version
        """The number of the last commit."""
        self._done: defaultdict[int, set[int]] = defaultdict(set)  # of steps after `complete`
        for unit in beyond:
            self._done[unit.step].add(unit.number)
        self._free: list[Unit] = []  # a heap of those whose lease ended without a commit
        self._leases: dict[int, UnitLease] = {}  # that count, by token, the oldest first
        self._of_worker: dict[int, int] = {}
        self._token = first_token
        self._last: int | None = None
        self._next = Unit(step + 1, 0)  # the first that has never been leased
        self._completed()

    def lease(self, worker: int, now: float, limit_s: float = float("inf")) -> UnitLease | None:
        """A unit for a worker, which gives up the lease that it had; None if it has to wait.

        Args:
            worker: who asks.
            now: seconds, on the clock of `since`.
            limit_s: how long another worker's lease counts when there is nothing else to compute.
        """
        self.leave(worker)
        unit = self._take() or self._take_over(now - limit_s)
        if unit is None:
            return None
        lease = UnitLease(self._token, unit, worker, self.version, now)
        self._token += 1
        self._leases[lease.token] = lease
        self._of_worker[worker] = lease.token
        return lease

    def find(self, token: int) -> UnitLease | None:
        """The lease with this token, while it counts."""
        return self._leases.get(token)

    def push(self, token: int) -> Committed | None:
        """What was computed under a lease is here: its commit, or None if it does not count."""
        lease = self._leases.pop(token, None)
        if lease is None:
            return None
        del self._of_worker[lease.worker]
        self.version += 1
        self._done[lease.unit.step].add(lease.unit.number)
        self._completed()
        return Committed(self.version, lease, self.version - 1 - lease.version)

    def leave(self, worker: int) -> None:
        """A worker will not finish what it has leased: the unit is leased again."""
        lease = self._leases.pop(self._of_worker.pop(worker, -1), None)
        if lease is not None:
            heapq.heappush(self._free, lease.unit)

    def stop_after(self, step: int | None) -> None:
        """Lease no unit of later steps; None for no such limit."""
        self._last = step

    @property
    def begun(self) -> int:
        """The last step of which a unit has been leased or committed."""
        return max(self.complete, self._next.step - (self._next.number == 0), *self._done, 0)

    @property
    def beyond(self) -> list[Unit]:
        """The units of steps after `complete` that are committed."""
        return [Unit(step, n) for step, done in sorted(self._done.items()) for n in sorted(done)]

    def may_lease(self, step: int) -> bool:
        """Whether units of a step may be leased now."""
        if self._last is not None and step > self._last:
            return False
        return self._staleness is None or step <= self.complete + 1 + self._staleness

    def _take(self) -> Unit | None:
        """The first unit that nobody has, if it may be leased."""
        if self._free and self.may_lease(self._free[0].step):
            return heapq.heappop(self._free)
        while self.may_lease(self._next.step):
            unit = self._next
            whole = unit.number + 1 == self._units(unit.step)
            self._next = Unit(unit.step + 1, 0) if whole else Unit(unit.step, unit.number + 1)
            if unit.number not in self._done.get(unit.step, ()):
                return unit
        return None

    def _take_over(self, before: float) -> Unit | None:
        """The unit whose lease is the oldest, if that was given before some moment."""
        oldest = next(iter(self._leases.values()), None)
        if oldest is None or oldest.since >= before:
            return None
        self.leave(oldest.worker)
        return self._take()

    def _completed(self) -> None:
        while len(self._done.get(self.complete + 1, ())) == self._units(self.complete + 1):
            self.complete += 1
            del self._done[self.complete]
        # what an earlier server has leased may be complete before it is reached here
        self._next = max(self._next, Unit(self.complete + 1, 0))
