"""The decisions of a pool: a pure function of its state and an event.

A core is free when the process on it has ended, not when it was asked to. The workers of a job are
reserved together, in the state that is journaled before anything starts. Way in: `decide`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from instep.pool.flows import again, settle
from instep.pool.hosts.placement import (
    GROW_S,
    HostEvent,
    after_host_event,
    placed,
    told,
    with_hosts,
    without,
)
from instep.pool.jobs import (
    COMMAND,
    ENDED,
    RUNNING,
    STOPPING,
    WAITING,
    AgainAsked,
    CancelAsked,
    ClientEnded,
    FlowSubmitted,
    JobSubmitted,
    PlacesTold,
    PoolEvent,
    PoolJob,
    PoolState,
    ResizeRefused,
    RunSeen,
)
from instep.pool.paces.curve import curve_of, left_of, noted, with_pace
from instep.pool.paces.doubts import doubted, inherited
from instep.pool.policy import plan

HALF_LIFE_S = 86_400.0

MOST_IN_VAIN = 4
"""Ends of a client without a step more than at the end before."""


def decide(state: PoolState, event: PoolEvent, now: float) -> PoolState:
    """The state after an event."""
    state = _counted(state, now)
    if isinstance(event, JobSubmitted):
        known = {job.key for job in state.jobs.values() if job.key}
        if event.job.id in state.jobs or event.job.key in known:
            return state
        state = _with(state, _with_length(state, event.job))
    elif isinstance(event, FlowSubmitted):
        if any(job.id in state.jobs for job in event.jobs):
            return state
        new = {job.id: _with_length(state, job) for job in event.jobs}
        state = replace(state, jobs={**state.jobs, **new})
    elif isinstance(event, AgainAsked):
        state = again(state, event.ids)
    elif isinstance(event, HostEvent):
        state = after_host_event(state, event, now)
    elif not (hasattr(event, "id") and event.id not in state.jobs):
        state = _after(state, event, now)
    return replan(settle(with_hosts(state, now), now), now)


def _after(state: PoolState, event: PoolEvent, now: float) -> PoolState:
    """The state after an event about a job that is there."""
    if isinstance(event, CancelAsked):
        return _with(state, _cancelled(state.jobs[event.id], now))
    if isinstance(event, RunSeen):
        return _with(state, _seen(state, state.jobs[event.id], event, now))
    if isinstance(event, PlacesTold):
        return _with(state, told(state.jobs[event.id], event))
    if isinstance(event, ResizeRefused):
        job = state.jobs[event.id]
        if job.status != RUNNING:
            return state
        if state.hosts:  # it keeps the places that its run knows
            kept = replace(job, places=job.told, target=sum(job.told.values()))
            return _with(state, replace(kept, fixed=True))
        return _with(state, replace(job, fixed=True, target=event.workers, held=event.workers))
    if isinstance(event, ClientEnded):
        return _with(state, _ended(state.jobs[event.id], event, now))
    return state


def replan(state: PoolState, now: float) -> PoolState:
    """The state with the targets of the policy, as far as cores are free by now."""
    wanted = plan(state, now, explain=False).workers
    if state.hosts:
        return with_hosts(placed(state, wanted, now), now)
    jobs, free = dict(state.jobs), state.cores - state.held
    for job in state.jobs.values():  # whoever gives first
        workers = wanted.get(job.id, 0)
        if job.status == RUNNING and workers < job.target:
            status = RUNNING if workers else STOPPING
            jobs[job.id] = replace(noted(job, now), status=status, target=workers, changed=now)
    takers = [job for job in jobs.values() if wanted.get(job.id, 0) > job.target]
    for job in sorted(takers, key=lambda each: (each.status == RUNNING, -each.priority)):
        workers = wanted[job.id]
        if job.status == WAITING and workers > free >= job.at_least:
            workers = free // job.unit * job.unit  # the rest as soon as it is free
        more = workers - job.held
        if more > free or (job.status == RUNNING and now - job.changed < GROW_S):
            continue
        if job.fixed and job.status == RUNNING:  # it goes on with more from its next start
            free -= more
            jobs[job.id] = replace(noted(job, now), status=STOPPING, target=0, changed=now)
        elif job.status in (WAITING, RUNNING):
            free -= max(0, more)
            jobs[job.id] = replace(
                noted(job, now),
                status=RUNNING,
                target=workers,
                held=max(job.held, workers),
                began=job.began if job.began is not None else now,
                changed=now,
            )
    return replace(state, jobs=jobs)


def _cancelled(job: PoolJob, now: float) -> PoolJob:
    if job.status == ENDED:
        return job
    if job.status == WAITING:
        return replace(job, status=ENDED, cancelled=True, outcome="cancelled", ended=now)
    return replace(job, status=STOPPING, cancelled=True, target=0, places={}, changed=now)


def _seen(state: PoolState, job: PoolJob, event: RunSeen, now: float) -> PoolJob:
    left = left_of(job, now) if event.left_s is None else event.left_s
    paces = with_pace(job.paces, *event.pace) if event.pace is not None else job.paces
    head_s = job.head_s
    if head_s is None and event.first and job.began and event.first > job.began:
        head_s = event.first - job.began
    if state.hosts:
        job = without(state, job, event.lost, event.begun, now)
        job = replace(job, seen_here=event.workers) if job.local else job
    elif job.status == RUNNING:  # a run that begins starts the workers that it was told at first
        had = job.target if event.begun else job.held
        job = replace(job, held=max(had, event.workers))
    job = replace(job, paces=paces)
    if event.pace is not None:
        job = replace(job, doubts=doubted(job, event.pace[0], now))
    return replace(
        job,
        left_s=left,
        seen=now if event.step else 0.0,  # before its first step it is not less from then on
        head_s=head_s,
        step=event.step,
        steps=event.steps or job.steps,
    )


def _with_length(state: PoolState, job: PoolJob) -> PoolJob:
    """The job, with the length of the last one like it that has completed."""
    for other in reversed([*state.jobs.values()]) if job.like else ():
        if other.like != job.like or other.outcome != "completed":
            continue
        if job.kind == COMMAND:
            return replace(job, left_s=other.results.get("seconds"))
        if other.steps and other.paces:
            left_s = other.steps * curve_of(other.paces).one_s
            doubts = inherited(other.doubts, job.submitted)
            return replace(job, left_s=left_s, paces=other.paces, doubts=doubts)
    return job


def _ended(job: PoolJob, event: ClientEnded, now: float) -> PoolJob:
    in_vain = 0 if event.step > job.step else job.in_vain + (job.status != STOPPING)
    workers, left_s = job.target, left_of(job, now)
    paces = with_pace(job.paces, *event.pace) if event.pace is not None else job.paces
    job = replace(job, target=0, held=0, step=max(job.step, event.step), in_vain=in_vain)
    job = replace(
        job, places={}, told={}, seen_here=0
    )  # its processes that have not ended are seen on hosts
    outcome = event.outcome
    if not outcome and job.cancelled:
        outcome = "cancelled"
    if not outcome and in_vain >= MOST_IN_VAIN:
        outcome = "failed"
    if outcome:
        results, why = event.results, event.why
        if outcome == "failed" and not why:
            why = f"its client ended {in_vain} times without another step: instep logs {job.id}"
        job = replace(job, status=ENDED, outcome=outcome, why=why, ended=now, results=results)
        job = replace(job, paces=paces, left_s=0.0 if job.succeeded else left_s)
        if event.last is not None:
            step_s = curve_of(job.paces).step_s(max(1, workers)) if job.paces else 0.0
            job = replace(job, tail_s=max(0.0, now - event.last - step_s))
        return job
    return replace(job, status=WAITING, left_s=left_s, seen=0.0)


def _counted(state: PoolState, now: float) -> PoolState:
    """The state with the use of each share up to now."""
    passed = now - state.at
    if passed <= 0:
        return state
    keep = 0.5 ** (passed / HALF_LIFE_S) if state.at else 0.0
    used = {share: seconds * keep for share, seconds in state.used.items()}
    if state.at:
        for job in state.jobs.values():
            if job.held and job.status in (RUNNING, STOPPING):
                used[job.share] = used.get(job.share, 0.0) + job.held * passed
    return replace(state, used=used, at=now)


def _with(state: PoolState, job: PoolJob) -> PoolState:
    jobs: Mapping[str, PoolJob] = {**state.jobs, job.id: job}
    return replace(state, jobs=jobs)
