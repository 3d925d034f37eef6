"""Paces that speak against more workers, and when such a one is measured once more.

A pace is one measurement, and the machine may have been busy just then. So a number of workers that
was no faster than fewer is not believed for ever: the job has it again after a minute, and after
twice as long each time that it is no faster again. Pure functions. Ways in: `believed`, `doubted`.
"""

from __future__ import annotations

from instep.pool.jobs import PoolJob
from instep.pool.paces.curve import Paces, curve_of

RETRY_S = 60.0
"""Until a number of workers that was no faster is tried again, the first time."""

LEAST_EFFICIENCY = 0.25
"""A worker adds at least so much of what one alone does."""

_MOST_TIMES = 16

Doubts = tuple[tuple[int, float, int], ...]
"""Workers that were no faster than fewer, when that was measured last, and how often."""


def is_slow(paces: Paces, fewer: int, workers: int) -> bool:
    """Whether so many workers are no faster than fewer, or each of them adds too little."""
    curve = curve_of(paces)
    enough = curve.speed(workers) / workers >= LEAST_EFFICIENCY
    return not (enough and curve.speed(workers) > curve.speed(fewer))


def believed(job: PoolJob, now: float) -> Paces:
    """The paces of a job, without those that were no faster and are to be measured once more."""
    kept: Paces = job.paces[:1]
    for pace in job.paces[1:]:
        if not (is_slow((*kept, pace), kept[-1][0], pace[0]) and _is_due(job, pace[0], now)):
            kept = (*kept, pace)
    return kept


def _is_due(job: PoolJob, workers: int, now: float) -> bool:
    """Whether it is time to measure again; nobody has said when something else made it slow."""
    for slow, at, times in job.doubts:
        if slow == workers:
            return now - at >= RETRY_S * (1 << (times - 1))
    return True


def doubted(job: PoolJob, workers: int, now: float) -> Doubts:
    """The doubts of a job with whose paces one with so many workers was measured now."""
    others = tuple(doubt for doubt in job.doubts if doubt[0] != workers)
    fewer = max((n for n, _ in job.paces if n < workers), default=workers)
    if fewer == workers or not is_slow(job.paces, fewer, workers):
        return others
    at, times = next(((a, t) for n, a, t in job.doubts if n == workers), (0.0, 0))
    if job.changed >= at:  # another stay with so many
        times = min(times + 1, _MOST_TIMES)
    return tuple(sorted((*others, (workers, now, times))))


def inherited(doubts: Doubts, now: float) -> Doubts:
    """The doubts of a job, for the next one like it, which begins now."""
    return tuple((workers, now, times) for workers, _, times in doubts)


def is_pace_news(job: PoolJob, workers: int, step_s: float, now: float) -> bool:
    """Whether a pace that was measured now says more than those that a job has."""
    known = dict(job.paces).get(workers)
    if known is None or workers not in dict(believed(job, now)):
        return True
    return abs(step_s - known) > known / 5
