"""Decides whether a job of a flow may begin, has to wait, or can never run: pure functions.

Ways in: `verdict` for one job, `settle` for a state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from instep.pool.jobs import ENDED, WAITING, FlowNeeds, PoolJob, PoolState, ResultTest

READY, LATER, NEVER = "ready", "later", "never"
"""Whether the needs of a job are met."""

COMPLETED, FAILED, AFTER_END = "completed", "failed", "ended"
"""Needs of the jobs before: all completed, one of them not completed, all ended."""

SKIPPED = "skipped"
"""The outcome of a job whose needs can never be met."""

SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def verdict(job: PoolJob, jobs: Mapping[str, PoolJob]) -> tuple[str, str]:
    """Whether the needs of a job are met; and what it waits for, or why they can never be."""
    if job.needs is None:
        return READY, ""
    before = [jobs[name] for name in job.needs.jobs if name in jobs]
    for cause in (_unmet(job.needs, before), *(_fails(t, jobs) for t in job.needs.tests)):
        if cause:
            return NEVER, cause
    if waiting := [each.id for each in before if each.status != ENDED]:
        return LATER, ", ".join(waiting)
    return READY, ""


def settle(state: PoolState, now: float) -> PoolState:
    """The state in which jobs whose needs can never be met have ended, with their cause."""
    jobs = dict(state.jobs)
    waiting = [job for job in jobs.values() if job.needs is not None and job.status == WAITING]
    changed = True
    while changed:
        changed = False
        for job in waiting:
            if jobs[job.id].status == WAITING:
                found, why = verdict(job, jobs)
                if found == NEVER:
                    jobs[job.id] = replace(job, status=ENDED, outcome=SKIPPED, why=why, ended=now)
                    changed = True
    return replace(state, jobs=jobs) if jobs != state.jobs else state


def again(state: PoolState, names: tuple[str, ...]) -> PoolState:
    """The state in which those of some jobs that have ended without success wait once more."""
    jobs = dict(state.jobs)
    for name in names:
        job = jobs.get(name)
        if job is not None and job.status == ENDED and not job.succeeded:
            jobs[name] = replace(
                job,
                status=WAITING,
                attempt=job.attempt + 1,
                cancelled=False,
                began=None,
                ended=None,
                in_vain=0,
                outcome="",
                why="",
            )
    return replace(state, jobs=jobs)


def _unmet(needs: FlowNeeds, before: list[PoolJob]) -> str:
    """Why what is needed of the jobs before can never be; empty if it can."""
    over = [each for each in before if each.status == ENDED]
    if needs.outcome == COMPLETED:
        lost = next((each for each in over if not each.succeeded), None)
        return f"{lost.id} is {lost.outcome}" if lost is not None else ""
    good = len(over) == len(before) and all(each.succeeded for each in over)
    return "nothing before it has failed" if needs.outcome == FAILED and good else ""


def _fails(test: ResultTest, jobs: Mapping[str, PoolJob]) -> str:
    """Why a test can never be passed; empty if it is passed, or not decided yet."""
    job = jobs[test.job]
    if not job.succeeded:
        return ""
    value = job.results.get(test.figure)
    if value is None:
        return f"{job.id} has not reported {test.figure}"
    if SIGNS[test.sign](value, test.value):
        return ""
    return f"{test.figure} of {job.id} is {value:g}, not {test.sign} {test.value:g}"
