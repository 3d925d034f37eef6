"""When the jobs of a pool will start and end: its policy, simulated forward with their lengths.

A job's length is its steps that are left times the time of one. Jobs that begin and end need some
seconds beside their steps: as many as the last ones needed. Nobody knows who submits what later, so
nothing of that is in it. A pure function. Way in: `forecast`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from instep.pool.flows import settle
from instep.pool.hosts.placement import placed
from instep.pool.jobs import COMMAND, ENDED, RUNNING, STOPPING, WAITING, PoolJob, PoolState
from instep.pool.paces.curve import curve_of, left_of
from instep.pool.policy import UNKNOWN_S, plan

HEAD_S, TAIL_S = 2.0, 1.0
"""Before a job's first step and after its last, until other figures are measured."""

RESIZE_S = 0.5
"""In which a job that is resized makes no step."""

LEAST_S = 0.001
"""Unix seconds in a float are hardly more exact."""

TURN_S = 10.0
"""Where shares take turns, they are looked at so often, or as often as can be."""

LAST = 20
"""Ended jobs whose figures are used."""

_ROUNDS = 4
"""Rounds in which places move from jobs that give some up to jobs that wait for them."""

MOST_LOOKED_AT = 100_000
"""Jobs times moments: the simulation of a very long queue ends there."""


class JobForecast(NamedTuple):
    """When a job starts and ends, in seconds from now; None where that is not known."""

    starts_s: float | None = None
    ends_s: float | None = None
    rests_on: str = ""
    """A job whose length is not known, and on which this rests; empty if there is none."""


class _Ahead:
    """One job in the simulation."""

    def __init__(self, job: PoolJob, now: float, head_s: float, tail_s: float) -> None:
        left = left_of(job, now)
        self.known = left is not None
        self.left = UNKNOWN_S if left is None else left
        self.head_s, self.tail_s = (0.0, 0.0) if job.kind == COMMAND else (head_s, tail_s)
        self.again_s = self.head_s if job.head_s is None else job.head_s
        self.workers = job.target if job.status == RUNNING else 0
        self.ready = now
        if job.status == RUNNING and not job.step and job.began is not None:
            self.ready = max(now, job.began + self.head_s)
        self.ends = now + self.tail_s if left == 0.0 else None  # its steps are made

    def next_s(self, job: PoolJob, now: float) -> float:
        """When it ends, or its last step does."""
        if self.ends is not None:
            return self.ends
        return max(now, self.ready) + self.left / curve_of(job.paces).speed(self.workers)

    def pass_to(self, job: PoolJob, before: float, now: float) -> None:
        """Let it make steps."""
        if self.workers and self.ends is None:
            seconds = max(0.0, now - max(before, self.ready))
            self.left -= seconds * curve_of(job.paces).speed(self.workers)
            if self.left <= LEAST_S:
                self.left, self.ends = 0.0, now + self.tail_s

    def resize(self, workers: int, now: float, *, fixed: bool) -> None:
        """Give it other workers; one that is `fixed` begins again with them."""
        if workers != self.workers:
            again_s = self.again_s if fixed else RESIZE_S
            pause = again_s if self.workers else self.head_s
            self.ready = max(self.ready, now + pause) if workers else self.ready
            self.workers = workers


def forecast(
    state: PoolState, now: float, *, wanted: str = "", most: int = MOST_LOOKED_AT
) -> Mapping[str, JobForecast]:
    """When each open job starts and ends.

    Args:
        state: of the pool.
        now: Unix seconds, as in it.
        wanted: a job; once its end is known, no other is looked for. Empty: all.
        most: jobs times moments that are looked at.
    """
    head_s, tail_s = margins(state.jobs.values())
    jobs = {job.id: job for job in state.jobs.values() if job.open}
    ahead = {name: _Ahead(job, now, head_s, tail_s) for name, job in jobs.items()}
    found = {name: JobForecast(0.0 if job.held else None) for name, job in jobs.items()}
    begin, moment, unknown = now, now, ""
    state = replace(state, jobs={name: _hopeful(job) for name, job in state.jobs.items()})
    hosts = {name: replace(host, workers={}) for name, host in state.hosts.items()}
    jobs_there = {name: replace(job, told=job.places) for name, job in state.jobs.items()}
    state = replace(state, hosts=hosts, jobs=jobs_there)  # who gives places up has given them up
    work_s = sum(each.left for each in ahead.values()) / max(1, state.cores)
    turn_s = max(TURN_S, work_s * len(jobs) / max(1, most))
    for _ in range(max(1, most // max(1, len(jobs)))):
        state = _planned(state, ahead, moment)
        for name, each in ahead.items():
            if each.workers and found[name].starts_s is None:
                found[name] = JobForecast(moment - begin, rests_on=unknown)
        running = [name for name, each in ahead.items() if each.workers]
        if not running or (wanted and found[wanted].ends_s is not None):
            break
        before = moment
        moment = min(ahead[name].next_s(state.jobs[name], before) for name in running)
        if len({state.jobs[name].share for name in ahead}) > 1 and len(ahead) > len(running):
            moment = min(moment, before + turn_s)  # shares that have used less come first
        state = _used(state, {name: ahead[name].workers for name in running}, moment - before)
        for name in running:
            ahead[name].pass_to(state.jobs[name], before, moment)
            ends = ahead[name].ends
            if ends is not None and ends <= moment:
                rests = unknown if ahead[name].known else name
                unknown = unknown or rests
                if ahead[name].known:
                    found[name] = found[name]._replace(ends_s=moment - begin, rests_on=rests)
                else:
                    found[name] = found[name]._replace(rests_on=rests)
                state = _ended(state, name, moment)
                del ahead[name]
    return found


def margins(jobs: Iterable[PoolJob]) -> tuple[float, float]:
    """Seconds that jobs need before their first step, and after their last."""
    ended = [job for job in jobs if job.ended and job.head_s is not None]
    last = sorted(ended, key=lambda job: job.ended or 0.0)[-LAST:]
    heads = [job.head_s for job in last if job.head_s is not None]
    tails = [job.tail_s for job in last if job.tail_s is not None]
    head_s = statistics.median(heads) if heads else HEAD_S
    return head_s, statistics.median(tails) if tails else TAIL_S


def _used(state: PoolState, workers: Mapping[str, int], seconds: float) -> PoolState:
    """The state with what its shares use in that time."""
    used = dict(state.used)
    for name, count in workers.items():
        share = state.jobs[name].share
        used[share] = used.get(share, 0.0) + count * seconds
    return replace(state, used=used)


def _hopeful(job: PoolJob) -> PoolJob:
    """The job, whose needs do not ask for figures, as nobody knows those before."""
    if job.needs is not None and job.needs.tests and job.status == WAITING:
        return replace(job, needs=replace(job.needs, tests=()))
    return job


def _planned(state: PoolState, ahead: Mapping[str, _Ahead], now: float) -> PoolState:
    """The state with the workers of the policy, given at once."""
    jobs = dict(state.jobs)
    for name, each in ahead.items():
        status = RUNNING if each.workers else WAITING
        fixed = jobs[name].fixed or each.ends is not None  # it keeps them to its end
        jobs[name] = replace(
            jobs[name],
            status=status,
            target=each.workers,
            held=each.workers,
            left_s=each.left if each.known else None,
            seen=now if each.workers else 0.0,
            fixed=fixed,
        )
    state = replace(state, jobs=jobs)
    wanted = plan(state, now, explain=False).workers
    if state.hosts and any(jobs[name].memory or jobs[name].local for name in ahead):
        state = _with_places(state, wanted, now)
        jobs = dict(state.jobs)
        wanted = {name: jobs[name].target for name in ahead}
    for name, each in ahead.items():
        workers = wanted.get(name, 0)
        if workers and jobs[name].began is None:
            jobs[name] = replace(jobs[name], began=now)
        each.resize(workers, now, fixed=jobs[name].fixed)
        status = RUNNING if workers else WAITING
        jobs[name] = replace(jobs[name], status=status, target=workers, held=workers)
    return replace(state, jobs=jobs)


def _with_places(state: PoolState, wanted: Mapping[str, int], now: float) -> PoolState:
    """The state with the places of each job, as if whoever gives some up did so at once."""
    for _ in range(_ROUNDS):
        before = state
        state = placed(state, wanted, now)
        jobs = dict(state.jobs)
        for name, job in jobs.items():
            if job.status == STOPPING:
                jobs[name] = replace(job, status=WAITING, target=0, places={}, told={})
            elif job.status == RUNNING:
                jobs[name] = replace(job, told=job.places, changed=0.0)
        state = replace(state, jobs=jobs)
        if all(job.places == before.jobs[name].places for name, job in jobs.items()):
            break
    return state


def _ended(state: PoolState, name: str, now: float) -> PoolState:
    """The state in which a job has completed."""
    job = replace(state.jobs[name], status=ENDED, outcome="completed", target=0, held=0, ended=now)
    job = replace(job, places={}, told={})
    return settle(replace(state, jobs={**state.jobs, name: job}), now)
