"""How fast a job is with some number of workers, from the steps that it has made with others.

A step of n workers takes `one_s * (1 + serial * (n - 1)) / n` where a part of it gets no shorter:
n times a step is linear in n. Between numbers that were measured it is taken to be; beyond the
largest one it goes on as between the last two. Pure functions. Ways in: `curve_of`, `left_of`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from instep.pool.jobs import RUNNING, PoolJob

SERIAL = 0.05
"""The part of a step that does not get shorter with workers, until something else is measured."""

Paces = tuple[tuple[int, float], ...]
"""Seconds of a step, by workers."""


class StepCurve(NamedTuple):
    """How long a step takes, by workers."""

    points: Paces = ()
    """Workers, and seconds of a step times those: in order."""

    @property
    def one_s(self) -> float:
        """Seconds of a step with one worker; 1 if nothing was measured."""
        return self.step_s(1) if self.points else 1.0

    def step_s(self, workers: int) -> float:
        """Seconds of a step with so many."""
        if not self.points:
            return 1.0 / speed(workers)
        first, y = self.points[0]
        if workers <= first:
            return y / (1 + SERIAL * (first - 1)) * (1 + SERIAL * (workers - 1)) / workers
        slope = SERIAL * y / (1 + SERIAL * (first - 1))
        for last, value in self.points[1:]:
            slope = (value - y) / (last - first)
            if workers <= last:
                break
            first, y = last, value
        else:
            slope = max(0.0, slope)
        return (y + slope * (workers - first)) / workers

    def speed(self, workers: int) -> float:
        """How much faster than one so many workers are."""
        return self.one_s / self.step_s(workers)


def speed(workers: int, serial: float = SERIAL) -> float:
    """How much faster than one so many workers are, where a part of a step gets no shorter."""
    return workers / (1.0 + serial * (workers - 1))


@lru_cache(maxsize=4096)
def curve_of(paces: Paces) -> StepCurve:
    """The curve through what was measured."""
    return StepCurve(tuple((workers, workers * step_s) for workers, step_s in paces))


def left_of(job: PoolJob, now: float) -> float | None:
    """Seconds of one worker that a job still needs, if it went on since they were noted."""
    if job.left_s is None or job.status != RUNNING or not job.seen:
        return job.left_s
    return max(0.0, job.left_s - max(0.0, now - job.seen) * curve_of(job.paces).speed(job.target))


def noted(job: PoolJob, now: float) -> PoolJob:
    """The job, of which it is noted now how long it still needs: it is about to be resized."""
    seen = now if job.status == RUNNING and job.seen else 0.0
    return replace(job, left_s=left_of(job, now), seen=seen)


def with_pace(paces: Paces, workers: int, step_s: float) -> tuple[tuple[int, float], ...]:
    """The paces, with one that was measured now, in order."""
    return tuple(sorted(({**dict(paces), workers: step_s}).items()))
