"""A pool for a person: its jobs in a table, its shares, and why a job waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from instep.pool.ahead.forecast import JobForecast, forecast
from instep.pool.flows import AFTER_END, FAILED, verdict
from instep.pool.hosts.free_places import places_taken
from instep.pool.hosts.keeping import KeptPlaces
from instep.pool.hosts.placement import placed_and_kept, room_refusal, with_hosts
from instep.pool.jobs import (
    COMMAND,
    ENDED,
    RUNNING,
    STOPPING,
    WAITING,
    FlowNeeds,
    PoolJob,
    PoolState,
)
from instep.pool.paces.doubts import believed
from instep.pool.policy import RESTART_GAIN, UNKNOWN_S, most_measured, plan
from instep.units import readable_bytes, readable_count, readable_seconds
from instep.words import listed, plural

LISTED = 20_000
"""Jobs times moments that a list looks ahead; one job may look further."""


def pool_lines(state: PoolState, scheduled: bool, notice: str = "") -> list[str]:
    """The cores and shares of a pool, and what its scheduler has to say."""
    working = "" if scheduled else "   no scheduler: instep pool start"
    cores = sum(host.cores for host in state.hosts.values()) or state.cores
    lines = [f"pool    {state.held} of {cores} cores busy{working}"]
    if scheduled and notice:
        lines.append(f"note    {notice}")
    shares = sorted({job.share for job in state.jobs.values() if job.status != ENDED})
    total = sum(state.weight(share) for share in shares)
    for share in shares:
        held = sum(job.held for job in state.jobs.values() if job.share == share)
        due = 100 * state.weight(share) / total
        lines.append(f"share   {share}: {held} cores, {100 * held / cores:.0f} % (due {due:.0f} %)")
    return lines


def host_lines(state: PoolState) -> list[str]:
    """The hosts of a pool, with the places that are taken on each."""
    taken = places_taken(state)
    lines = []
    for name, host in state.hosts.items():
        used = {job: places[name] for job, places in taken.items() if places.get(name)}
        line = f"host    {name}: {sum(used.values())} of {host.cores} cores busy"
        if host.memory:
            memory = memory_used(state, name, taken)
            line += f", {readable_bytes(memory)} of {readable_bytes(host.memory)}"
        if used:
            line += f" ({', '.join(f'{job} {workers}' for job, workers in used.items())})"
        if host.drained:
            line += ", draining" if used else ", drained"
        elif host.leaving:
            line += ", leaving"
        if host.away is not None and host.on_demand and not used:
            line += ", started once jobs wait for it"
        elif host.away is not None:
            line += f", out of reach since {_clock(host.away)}"
        lines.append(line)
    return lines


def memory_used(state: PoolState, host: str, taken: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes that the places taken on a host stand for."""
    return sum(
        places.get(host, 0) * state.jobs[job].memory
        for job, places in taken.items()
        if job in state.jobs
    )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def job_lines(state: PoolState, now: float | None = None) -> list[str]:
    """A table of the jobs that have not ended, and of the last that have."""
    now = time.time() if now is None else now
    state = with_hosts(state, now)
    planned, ahead = plan(state, now), forecast(state, now, most=LISTED)
    reasons = {**planned.reasons, **_kept_reasons(state, planned.workers, now)}
    names = ("job", "share", "state", "workers", "priority", "step", "starts", "ends", "waits for")
    rows = [names]
    ended = sorted((j for j in state.jobs.values() if j.ended), key=lambda job: job.ended or 0.0)
    for job in [*ended[-10:], *(j for j in state.jobs.values() if j.status != ENDED)]:
        workers = f"{job.held} of {job.at_most}" if job.held else "-"
        steps = f"/{readable_count(job.steps)}" if job.steps else ""
        step = f"{readable_count(job.step)}{steps}" if job.step or job.steps else "-"
        waits = job.why.splitlines()[0][:60] if job.why else reasons.get(job.id, "")
        row = (job.id, job.share, state_of(job), workers, str(job.priority), step)
        rows.append((*row, *_moments(job, ahead.get(job.id)), waits))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def state_of(job: PoolJob) -> str:
    """The state of a job, in a word or two."""
    if job.status == ENDED:
        return job.outcome
    if job.status == STOPPING:
        return "being cancelled" if job.cancelled else "being parked"
    return job.status if job.status == RUNNING or not job.step else "parked"


def explanation(
    state: PoolState,
    job: PoolJob,
    now: float | None = None,
    ahead: Mapping[str, JobForecast] | None = None,
) -> list[str]:
    """Why a job is where it is, and until when.

    Args:
        state: of its pool.
        job: to explain.
        now: Unix seconds.
        ahead: the forecast of all jobs, where there is one already.
    """
    now = time.time() if now is None else now
    state = with_hosts(state, now)
    lines = [f"{job.id}   {state_of(job)}   share {job.share}, priority {job.priority}"]
    if job.saves and job.status != ENDED:
        lines.append(
            f"saves   every {job.saves}, as the pool says: the job has no checkpoint.every"
        )
    if job.status == RUNNING:
        lines.append(f"workers {job.held} of {job.at_most}, {job.at_least} at least")
        if job.fixed:
            lines.append(
                "size    its run is resized by another start at its last commit: with more once "
                f"that saves {RESTART_GAIN:g} times what a start takes, with fewer only if others "
                "need its cores"
            )
        elif job.target < job.at_most and job.target + job.unit > most_measured(
            job, believed(job, now)
        ):
            lines.append(
                f"size    more than {job.target} once its steps are measured with so many; "
                "--at-least has more from the start"
            )
        lines += _ahead_lines(job, _of(state, job, now, ahead), now)
    elif job.status == STOPPING:
        lines.append(f"next    it {how_it_ends(job)}")
    elif job.status == ENDED:
        lines += [f"why     {line}" for line in job.why.splitlines()]
    else:
        planned = plan(state, now)
        why = planned.reasons.get(job.id)
        if why is None:
            givers = [
                other.id
                for other in state.jobs.values()
                if other.held > planned.workers.get(other.id, 0)
            ]
            why = f"{job.at_least} cores: {', '.join(givers) or 'the scheduler'} gives them now"
            if state.hosts:
                kept = _kept_reasons(state, planned.workers, now).get(job.id)
                why = kept or (room_refusal(state, job) if not givers else "") or why
        lines.append(f"waits   {why}")
        if job.needs is not None and verdict(job, state.jobs)[1]:
            lines.append(f"needs   {_after_needs(job.needs)}")
        lines += _ahead_lines(job, _of(state, job, now, ahead), now)
    return lines


def _kept_reasons(state: PoolState, wanted: Mapping[str, int], now: float) -> dict[str, str]:
    """Reasons of the jobs that come first, and have no room on the hosts yet."""
    if not state.hosts:
        return {}
    found = placed_and_kept(state, wanted, now)[1]
    return {name: _kept_text(state.jobs[name], kept) for name, kept in found.items() if kept}


def _kept_text(job: PoolJob, kept: KeptPlaces) -> str:
    memory = f" of {readable_bytes(job.memory)}" if job.memory else ""
    places = f"{plural(job.at_least, 'worker')}{memory}"
    where = listed([*kept.places], 3)
    if kept.gives:
        return f"{places}: on {where}, where {listed([*kept.gives], 3)} gives some up now"
    others = listed(kept.waits_for, 3)
    return f"{places}: kept for it on {where}, once {others} has given back what it has there"


def _of(
    state: PoolState, job: PoolJob, now: float, ahead: Mapping[str, JobForecast] | None
) -> JobForecast:
    found = forecast(state, now, wanted=job.id) if ahead is None else ahead
    return found.get(job.id, JobForecast())


def _ahead_lines(job: PoolJob, found: JobForecast, now: float) -> list[str]:
    """When it starts and ends, and what that rests on."""
    rests = ""
    if found.rests_on and found.rests_on != job.id:
        rests = (
            f", if {found.rests_on}, whose length is not known, takes {readable_seconds(UNKNOWN_S)}"
        )
    lines = []
    if not job.held and found.starts_s != 0.0:
        starts = "not known yet"
        if found.starts_s is not None:
            starts = f"{_in(found.starts_s, now)}{rests}"
        lines.append(f"starts  {starts}")
    if found.ends_s is not None:
        lines.append(f"ends    {_in(found.ends_s, now)}{rests if job.held else ''}")
    elif job.held:
        lines.append("ends    not known yet")
    return lines


def _in(seconds: float, now: float) -> str:
    clock = time.strftime("%H:%M", time.localtime(now + seconds))
    return f"in about {readable_seconds(round(seconds))} ({clock})"


def how_it_ends(job: PoolJob) -> str:
    """Say what becomes of a job that is to stop."""
    if job.status == WAITING:
        return "will not start"
    if job.kind == COMMAND:
        return "is asked to end, and killed if it has not after ten seconds"
    return "stops at its next commit, and is saved"


def _after_needs(needs: FlowNeeds) -> str:
    tests = [f"{t.figure} of {t.job} {t.sign} {t.value:g}" for t in needs.tests]
    words = {FAILED: "one of them has not completed", AFTER_END: "they have ended"}
    return " and ".join([f"once {words.get(needs.outcome, 'they have completed')}", *tests])


def as_tables(
    state: PoolState, now: float | None = None, ahead: Mapping[str, JobForecast] | None = None
) -> list[dict[str, Any]]:
    """All jobs as plain data, with the Unix seconds at which they start and end, where that is
    known."""
    now = time.time() if now is None else now
    state = with_hosts(state, now)
    ahead = forecast(state, now, most=LISTED) if ahead is None else ahead
    found = []
    for job in state.jobs.values():
        table = {**msgspec.to_builtins(job), "state": state_of(job)}
        soon = ahead.get(job.id, JobForecast())
        starts, ends = (None if s is None else now + s for s in (soon.starts_s, soon.ends_s))
        table |= {"starts_at": None if job.held else starts, "ends_at": ends}
        found.append(table)
    return found


def status_table(state: PoolState, scheduled: bool, notice: str = "") -> dict[str, Any]:
    """A pool as plain data: its cores, its hosts, and its jobs."""
    return {
        "cores": sum(host.cores for host in state.hosts.values()) or state.cores,
        "held": state.held,
        "scheduled": scheduled,
        "note": notice or None,
        "hosts": host_tables(state),
        "jobs": as_tables(state),
    }


def host_tables(state: PoolState) -> list[dict[str, Any]]:
    """The hosts of a pool as plain data, with the places that each job takes there."""
    taken = places_taken(state)
    return [
        {
            "host": name,
            "cores": host.cores,
            "memory": host.memory or None,
            "memory_used": memory_used(state, name, taken),
            "drained": host.drained,
            "leaving": host.leaving,
            "on_demand": host.on_demand,
            "out_of_reach_since": host.away,
            "workers": {job: places[name] for job, places in taken.items() if places.get(name)},
        }
        for name, host in state.hosts.items()
    ]


def _moments(job: PoolJob, found: JobForecast | None) -> tuple[str, str]:
    """When a job starts and ends, for a table."""
    if found is None:
        return "", ""
    moments = (None if job.held else found.starts_s, found.ends_s)
    starts, ends = ("" if s is None else f"in {readable_seconds(round(s))}" for s in moments)
    return starts, ends
