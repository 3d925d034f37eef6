"""Who gets how many workers: one pure function of the jobs of a pool, and why others wait.

1. Every job first gets its `at_least`. Shares come in turn, always the one with the fewest workers
   for its weight, and of equal ones the one that has used less. Within a share the higher priority
   comes first, then what has begun, then the shortest remaining time, shortened by waiting.
2. What is left goes, share by share in the same way, to the job with the largest gain in speed for
   a worker, divided by the square root of its remaining time.
3. So a job that waits takes workers from whoever is above its share, which shrinks. A job is parked
   only if nothing is left to shrink, and a command never.

Way in: `plan`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from instep.pool.flows import verdict
from instep.pool.jobs import COMMAND, RUNNING, WAITING, PoolJob, PoolState

USED_S = 300.0
"""Differences in use of less, in core seconds for a weight of 1, park nobody."""

KEPT = 1.25
"""A worker that a job has counts as so much more gain than one that it would get."""

SERIAL = 0.05
"""The part of a step that does not get shorter with workers, until something else is measured."""

LEAST_EFFICIENCY = 0.25

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
    found = dict.fromkeys((job.id for job in jobs), 0)
    totals = dict.fromkeys((job.share for job in jobs), 0)
    reasons, free, left = _least(state, jobs, found, totals, now)
    for job in left if explain else ():
        reasons[job.id] = _refusal(state, job, job.at_least, totals[job.share], free=0)
    _grow(state, [job for job in jobs if found[job.id] and not job.fixed], found, totals, free)
    return WorkerPlan(found, reasons | {name: why for name, why in behind.items() if why})


def _least(
    state: PoolState,
    jobs: Sequence[PoolJob],
    found: dict[str, int],
    totals: dict[str, int],
    now: float,
) -> tuple[dict[str, str], int, list[PoolJob]]:
    """Give each job what it cannot run without.

    Returns:
        Why others wait; the cores that are left; and the jobs for which none were.
    """
    reasons: dict[str, str] = {}
    free = state.cores
    for job in jobs:
        if job.kind == COMMAND and job.status == RUNNING:  # it would begin anew
            found[job.id] = job.target
            totals[job.share] += job.target
            free -= job.target
    queues = _queues((job for job in jobs if not found[job.id]), now)
    while free and (share := _next_share(state, totals, queues)):
        job = queues[share].pop()
        least = job.target if job.fixed and job.status == RUNNING else job.at_least
        if why := _refusal(state, job, least, totals[share], free):
            reasons[job.id] = why
        else:
            found[job.id] = least
            totals[share] += least
            free -= least
    return reasons, free, [job for queue in queues.values() for job in queue]


def _grow(
    state: PoolState,
    jobs: Sequence[PoolJob],
    found: dict[str, int],
    totals: dict[str, int],
    free: int,
) -> None:
    """Give the cores that are left to those that gain most; who cannot grow now never can."""
    growing: dict[str, list[tuple[float, str, PoolJob]]] = {share: [] for share in totals}
    for job in jobs:
        growing[job.share].append((-gain(job, found[job.id]), job.id, job))
    for heap in growing.values():
        heapq.heapify(heap)
    while free and (share := _next_share(state, totals, growing)):
        _, _, job = heapq.heappop(growing[share])
        if _may_grow(state, job, found, totals, free):
            found[job.id] += job.unit
            totals[share] += job.unit
            free -= job.unit
            heapq.heappush(growing[share], (-gain(job, found[job.id]), job.id, job))


def _next_share(
    state: PoolState, totals: Mapping[str, int], queues: Mapping[str, Sequence[object]]
) -> str:
    """The share that is furthest below its due, of those that have somebody; empty if none has."""

    def level(share: str) -> tuple[float, int, str]:
        weight = state.weight(share)
        return totals[share] / weight, int(state.used.get(share, 0.0) / weight / USED_S), share

    return min((share for share, queue in queues.items() if queue), key=level, default="")


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
    if least > state.cores or (limit is not None and least > limit):
        most = state.cores if least > state.cores else limit
        return f"it needs {least} workers at least, and can never have more than {most} here"
    if limit is not None and total + least > limit:
        return f"share {job.share} has its limit of {limit} workers"
    if free < least:
        return f"{least - free} more cores: others come first, or have been here longer"
    return ""


def _may_grow(
    state: PoolState, job: PoolJob, found: Mapping[str, int], totals: Mapping[str, int], free: int
) -> bool:
    workers = found[job.id] + job.unit
    within = totals[job.share] + job.unit <= state.limits.get(job.share, workers + state.cores)
    useful = speed(workers) / workers >= LEAST_EFFICIENCY
    return workers <= job.at_most and job.unit <= free and within and useful


def speed(workers: int) -> float:
    """How much faster a job is than with one worker."""
    return workers / (1.0 + SERIAL * (workers - 1))


def gain(job: PoolJob, workers: int) -> float:
    """The worth of some more workers for a job that has so many."""
    more = (speed(workers + job.unit) - speed(workers)) / job.unit
    kept = KEPT if job.status == RUNNING and workers < job.target else 1.0
    return kept * more / math.sqrt(max(1.0, job.left_s or UNKNOWN_S))


def start_in_s(state: PoolState, job: PoolJob) -> float | None:
    """Seconds until there is probably room for a job that waits; None if that is not known.

    Jobs that run are taken to keep their workers; others that wait are not looked at.
    """
    free, ends = state.cores - state.held, list[tuple[float, int]]()
    for other in state.jobs.values():
        shrinks = max(0, other.held - other.at_least) if other.status == RUNNING else other.held
        free += shrinks
        if other.held and other.target and other.left_s is not None:
            ends.append((other.left_s / speed(other.target), other.held - shrinks))
    waited = 0.0
    for end, cores in sorted(ends):
        if free >= job.at_least:
            break
        waited, free = end, free + cores
    return waited if free >= job.at_least else None


Policy = Callable[[PoolState, float], WorkerPlan]
