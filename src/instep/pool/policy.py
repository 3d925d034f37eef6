"""Who gets how many workers: one pure function of the jobs of a pool, and why others wait.

1. Shares come in turn: always the one with the fewest workers for its weight, where half of those
   that it takes next count, and of equal ones the one that has used less.
2. Within a share every job first gets its `at_least`: the higher priority, then what has begun,
   then the shortest remaining time, shortened by waiting. Then the job grows that gains most speed
   from a worker, divided by the square root of its remaining time.
3. So a job that waits takes workers from whoever is above its share, which shrinks. A job is parked
   only if nothing of its share is left to shrink, and a command never.

Way in: `plan`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from instep.pool.flows import verdict
from instep.pool.hosts.free_places import local_cores, room_on
from instep.pool.hosts.planned_room import PlannedRoom
from instep.pool.jobs import COMMAND, RUN, RUNNING, WAITING, PoolJob, PoolState
from instep.pool.paces.curve import Paces, StepCurve, curve_of, left_of
from instep.pool.paces.doubts import believed, is_slow

USED_S = 300.0
"""Differences in use of less, in core seconds for a weight of 1, park nobody."""

KEPT = 1.25
"""A worker that a job has counts as so much more gain than one that it would get."""

SHORT_FIRST = 0.5
"""Workers go to short jobs rather than to long ones, by this power of their length."""

UNMEASURED = 4
"""Workers that a job has before its steps are measured; then at most twice as many as were."""

RESTART_GAIN = 5.0
"""A run that cannot be resized ends and begins again with more workers where that saves so many
times the seconds that its start took."""

UNKNOWN_S = 600.0
"""A job whose length is not known is taken to need so many seconds of one worker."""


class WorkerPlan(NamedTuple):
    """Workers as they should be, at once if nothing had to end first."""

    workers: Mapping[str, int]
    """Workers of each open job; 0 for one that waits."""
    reasons: Mapping[str, str]
    """Why a job waits."""


def plan(state: PoolState, now: float, *, explain: bool = True) -> WorkerPlan:
    """The workers of each open job; why others wait is left out where nobody asks."""
    jobs = [job for job in state.jobs.values() if job.open]
    behind = {
        job.id: verdict(job, state.jobs)[1]
        for job in jobs
        if job.needs is not None and job.status == WAITING
    }
    jobs = [job for job in jobs if not behind.get(job.id)]
    given = _WorkersDealt(state, jobs, now)
    given.deal()
    rigid: set[str] = set()
    while in_vain := {j.id for j in jobs if _begins_again_in_vain(j, given.found[j.id], now)}:
        rigid |= in_vain  # what they cannot use is for others
        given = _WorkersDealt(state, jobs, now, rigid)
        given.deal()
    reasons = given.reasons
    for job in given.left() if explain else ():
        reasons[job.id] = _refusal(state, job, job.at_least, given.totals[job.share], free=0)
    return WorkerPlan(given.found, reasons | {name: why for name, why in behind.items() if why})


class _WorkersDealt:
    """The workers that are given so far, share by share; who cannot have more now never can."""

    def __init__(
        self,
        state: PoolState,
        jobs: Sequence[PoolJob],
        now: float,
        rigid: Collection[str] = (),
    ) -> None:
        self._state, self._now, self.free = state, now, state.cores
        self._local = local_cores(state)  # for those that have no other place
        self._rigid = rigid  # jobs that keep the workers that they have
        memory = state.hosts and any(job.memory for job in jobs)
        self._room = PlannedRoom(state) if memory else None
        self._paces: dict[str, Paces] = {}
        self.found = dict.fromkeys((job.id for job in jobs), 0)
        self.totals = dict.fromkeys((job.share for job in jobs), 0)
        self.reasons: dict[str, str] = {}
        self._growing: dict[str, list[tuple[float, str, PoolJob]]] = {s: [] for s in self.totals}
        self._next: dict[str, int] = {}  # workers that the next job of each share takes
        for job in jobs:
            if job.kind == COMMAND and job.status == RUNNING:  # it would begin anew
                self._give(job, job.target)
        self._queues = _queues((job for job in jobs if not self.found[job.id]), now)
        for share in self.totals:
            self._look_ahead(share)

    def deal(self) -> None:
        """Give until no core is left, or nobody can have one."""
        while self.free and (share := _next_share(self._state, self.totals, self._next)):
            if queue := self._queues.get(share):
                self._admit(queue.pop())
            else:
                self._grow(heapq.heappop(self._growing[share])[2])
            self._look_ahead(share)

    def left(self) -> list[PoolJob]:
        """The jobs for which no core was left."""
        return [job for queue in self._queues.values() for job in queue]

    def _give(self, job: PoolJob, more: int) -> None:
        self.found[job.id] += more
        self.totals[job.share] += more
        self.free -= more
        if job.local:
            self._local -= more
        if self._room is not None:
            self._room.take(job, more)

    def _free_for(self, job: PoolJob) -> int:
        return min(self.free, self._local) if job.local else self.free

    def _admit(self, job: PoolJob) -> None:
        least, total = _least_of(job), self.totals[job.share]
        why = _refusal(self._state, job, least, total, self._free_for(job))
        if why := why or self._no_memory(job, least):
            self.reasons[job.id] = why
            return
        self._give(job, least)
        if job.id not in self._rigid:
            self._push(job)

    def _no_memory(self, job: PoolJob, least: int) -> str:
        """Why a job that waits keeps nobody waiting: hosts in reach have too little together."""
        if not (self._state.hosts and job.memory and job.status == WAITING):
            return ""
        reach = [host for host in self._state.hosts.values() if host.away is None]
        most = room_on((host for host in reach if not host.closed), job)
        if most >= least:
            return ""
        return f"it needs {least} workers at least, and the hosts in reach have memory for {most}"

    def _paces_of(self, job: PoolJob) -> Paces:
        if job.id not in self._paces:
            self._paces[job.id] = believed(job, self._now)
        return self._paces[job.id]

    def _grow(self, job: PoolJob) -> None:
        found, paces, free = self.found[job.id], self._paces_of(job), self._free_for(job)
        fits = self._room is None or self._room.has(job, job.unit)
        if fits and _may_grow(self._state, job, paces, found, self.totals[job.share], free):
            self._give(job, job.unit)
            self._push(job)

    def _push(self, job: PoolJob) -> None:
        left_s = left_of(job, self._now)
        left_s = UNKNOWN_S if left_s is None else left_s
        worth = gain(job, self.found[job.id], left_s, curve_of(self._paces_of(job)))
        heapq.heappush(self._growing[job.share], (-worth, job.id, job))

    def _look_ahead(self, share: str) -> None:
        if queue := self._queues.get(share):
            self._next[share] = _least_of(queue[-1])
        elif self._growing[share]:
            self._next[share] = self._growing[share][0][2].unit
        else:
            self._next.pop(share, None)


def _least_of(job: PoolJob) -> int:
    """Workers without which a job does not run, or that it cannot give."""
    return job.target if job.fixed and job.status == RUNNING else job.at_least


def _next_share(state: PoolState, totals: Mapping[str, int], next_ones: Mapping[str, int]) -> str:
    """The share that is furthest below its due, of those that have somebody; empty if none has.

    Half of the workers that its next job takes count as taken: so shares whose jobs take several at
    once get neither more nor less in the mean (the rule of Sainte-Lague).

    Args:
        state: with weights and use.
        totals: workers of each share so far.
        next_ones: workers that the next job of each share takes.
    """

    def level(share: str) -> tuple[float, int, str]:
        weight = state.weight(share)
        taken = (totals[share] + next_ones[share] / 2) / weight
        return taken, int(state.used.get(share, 0.0) / weight / USED_S), share

    return min(next_ones, key=level, default="")


def _queues(jobs: Iterable[PoolJob], now: float) -> dict[str, list[PoolJob]]:
    """The jobs of each share, the first one last."""

    def order(job: PoolJob) -> tuple[int, int, float, float, str]:
        began, runs = job.began or 0.0, job.status == RUNNING
        left = job.left_s or UNKNOWN_S
        aged = left / (1.0 + max(0.0, now - job.submitted) / UNKNOWN_S)
        first = not runs if began else 2
        return -job.priority, first, began or aged, job.submitted, job.id

    queues: dict[str, list[PoolJob]] = {}
    for job in sorted(jobs, key=order, reverse=True):
        queues.setdefault(job.share, []).append(job)
    return queues


def _refusal(state: PoolState, job: PoolJob, least: int, total: int, free: int) -> str:
    """Why a job cannot run now; empty if it can."""
    limit = state.limits.get(job.share)
    if state.hosts and job.local and least > (here := local_cores(state)):
        return f"it runs on the scheduler's machine, which gives {here} cores now"
    if state.hosts and least > state.cores:
        return f"it needs {least} workers at least, and the hosts in reach have {state.cores} cores"
    if least > state.cores or (limit is not None and least > limit):
        most = state.cores if least > state.cores else limit
        return f"it needs {least} workers at least, and can never have more than {most} here"
    if limit is not None and total + least > limit:
        return f"share {job.share} has its limit of {limit} workers"
    if free < least:
        return f"{least - free} more cores: others come first, or have been here longer"
    return ""


def _may_grow(
    state: PoolState, job: PoolJob, paces: Paces, found: int, total: int, free: int
) -> bool:
    workers = found + job.unit
    within = total + job.unit <= state.limits.get(job.share, workers + state.cores)
    seen = workers <= most_measured(job, paces)
    room = workers <= job.at_most and job.unit <= free and within and seen
    return room and not is_slow(paces, found, workers)


def most_measured(job: PoolJob, paces: Paces) -> int:
    """Workers that a job may have beyond its `at_least` until its steps are measured with more.

    Args:
        job: that is to grow.
        paces: those of it that are believed.
    """
    if job.kind != RUN:  # the trials of a search are measured by nobody
        return job.at_most
    return max(UNMEASURED, 2 * paces[-1][0] if paces else 0)


def gain(job: PoolJob, workers: int, left_s: float, curve: StepCurve) -> float:
    """The worth of some more workers for a job that has so many, and so many seconds left."""
    more = (curve.speed(workers + job.unit) - curve.speed(workers)) / job.unit
    kept = KEPT if job.status == RUNNING and workers < job.target else 1.0
    return kept * more / math.pow(max(1.0, left_s), SHORT_FIRST)


def is_worth_a_restart(job: PoolJob, workers: int, now: float) -> bool:
    """Whether a run that cannot be resized is to stop at a commit, and go on with more workers."""
    left_s = left_of(job, now)
    if left_s is None or job.head_s is None or not job.step:
        return False
    speed = curve_of(believed(job, now)).speed
    saved_s = left_s / speed(job.target) - left_s / speed(workers)
    return saved_s > RESTART_GAIN * job.head_s


def _begins_again_in_vain(job: PoolJob, workers: int, now: float) -> bool:
    """Whether a run would have to begin again for workers that it is given, and gain too little."""
    grows = job.fixed and job.status == RUNNING and workers > job.target
    return grows and not is_worth_a_restart(job, workers, now)


Policy = Callable[[PoolState, float], WorkerPlan]
