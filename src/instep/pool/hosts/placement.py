"""On which hosts of a pool the workers of each job are: pure functions of its state.

How many workers a job is to have is decided elsewhere (`policy.py`). A place on a host is taken as
long as a job is to have a worker there, its run may start one there, or a process of it has not
ended there. A host that is out of reach gets nothing new, and what it had is taken to be there.
Where there is no room for a job that comes first, some is kept for it (`keeping.py`). Ways in:
`placed`, `with_hosts`, `after_host_event`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from instep.pool.hosts.free_places import FreePlaces, places_taken, room_on
from instep.pool.hosts.keeping import MOST_KEPT, KeptPlaces, kept_for
from instep.pool.jobs import (
    COMMAND,
    RUNNING,
    STOPPING,
    WAITING,
    DrainAsked,
    HostAway,
    HostSeen,
    PlacesTold,
    PoolJob,
    PoolState,
)
from instep.pool.paces.curve import noted

GROW_S = 5.0
"""A job grows at most so often."""

BACK_S = 10.0
"""A host that is out of reach for less is expected back: what it has room for is not given up."""

BEGIN_S = 300.0
"""A run whose workers have not begun to train by then gives its places back."""

HostEvent = HostSeen | HostAway | DrainAsked


def after_host_event(state: PoolState, event: HostEvent, now: float) -> PoolState:
    """The state after an event about a host; unchanged if there is no such host."""
    host = state.hosts.get(event.host)
    if host is None:
        return state
    if isinstance(event, HostSeen):
        host = replace(host, away=None, workers=event.workers, leaving=event.leaving)
    elif isinstance(event, HostAway):
        host = replace(host, away=now if host.away is None else host.away)
    else:
        host = replace(host, drained=event.drained)
    return replace(state, hosts={**state.hosts, event.host: host})


def all_away(state: PoolState, now: float) -> PoolState:
    """A state of which nobody has heard from any host yet, as at the start of a scheduler."""
    hosts = {
        name: replace(host, away=now if host.away is None else host.away)
        for name, host in state.hosts.items()
    }
    return replace(state, hosts=hosts)


def told(job: PoolJob, event: PlacesTold) -> PoolJob:
    """A job whose run knows its places."""
    return replace(job, told=event.places)


def without(
    state: PoolState, job: PoolJob, lost: Sequence[str], begun: bool, now: float
) -> PoolJob:
    """A job whose run does not have some hosts: of those out of reach it gives up the places.

    One that has not begun to train gives all its places back, also if its hosts take too long. One
    that has lost all its hosts waits: nobody else has the state of its last commit.

    Args:
        state: of the pool.
        job: as it is in that.
        lost: hosts that its run does not have.
        begun: whether its workers have begun to train.
        now: Unix seconds.
    """
    if job.status != RUNNING or not job.places or job.local:
        return job
    gone = {name for name in lost if is_gone(state, name, now)}
    left = {name: workers for name, workers in job.places.items() if name not in gone}
    late = now - job.changed > BEGIN_S
    if not begun and (late or len(left) < len(job.places)):
        in_vain = job.in_vain + late
        return replace(job, status=STOPPING, target=0, places={}, in_vain=in_vain, changed=now)
    if not left or len(left) == len(job.places) or job.fixed:
        return job
    return replace(_with_places(job, left, now), changed=0.0)  # it may have others at once


def is_gone(state: PoolState, name: str, now: float) -> bool:
    """Whether a host has been out of reach for so long that it is not waited for."""
    host = state.hosts.get(name)
    return host is None or (host.away is not None and now - host.away > BACK_S)


def with_hosts(state: PoolState, now: float) -> PoolState:
    """The state with the cores that each job has on hosts, and those that there are for all.

    Of a host that is drained or leaving, and out of reach, somebody has said that it will not be
    back: nothing is taken to be there, until it says so itself.
    """
    if not state.hosts:
        return state
    lost = {
        name: replace(host, workers={})
        for name, host in state.hosts.items()
        if host.closed and host.workers and is_gone(state, name, now)
    }
    if lost:
        state = replace(state, hosts={**state.hosts, **lost})
    taken, jobs = places_taken(state), dict(state.jobs)
    for name, job in state.jobs.items():
        held = sum(taken.get(name, {}).values())
        if held != job.held:
            jobs[name] = replace(job, held=held)
    return replace(state, jobs=jobs, cores=_cores(state, now))


def _cores(state: PoolState, now: float) -> int:
    """Places that can be had, with those that jobs have on hosts which are out of reach, and
    commands on hosts that drain."""
    cores = sum(
        host.cores
        for name, host in state.hosts.items()
        if not host.closed and not is_gone(state, name, now)
    )
    gone = {n for n, host in state.hosts.items() if not host.closed and is_gone(state, n, now)}
    kept = sum(job.places.get(n, 0) for job in state.jobs.values() if job.places for n in gone)
    stay = {n for n, host in state.hosts.items() if host.closed}
    commands = (job for job in state.jobs.values() if job.kind == COMMAND and job.places)
    return cores + kept + sum(job.places.get(n, 0) for job in commands for n in stay)


def placed(state: PoolState, wanted: Mapping[str, int], now: float) -> PoolState:
    """The state with places for the workers that jobs are to have, as far as there are any by now.

    All workers without which a job does not start are placed together, or none.

    Args:
        state: with what jobs have.
        wanted: workers of each open job.
        now: Unix seconds.
    """
    return placed_and_kept(state, wanted, now)[0]


def placed_and_kept(
    state: PoolState, wanted: Mapping[str, int], now: float
) -> tuple[PoolState, Mapping[str, KeptPlaces | None]]:
    """Place as `placed` does, and say which places are kept for the first jobs without room."""
    jobs = dict(state.jobs)
    for job in state.jobs.values():
        if job.status == RUNNING:
            jobs[job.id] = _giving(state, job, wanted.get(job.id, 0), now)
    room = FreePlaces(state.hosts, jobs, places_taken(replace(state, jobs=jobs)))
    kept: dict[str, KeptPlaces | None] = {}
    open_jobs = [job for job in jobs.values() if job.status in (WAITING, RUNNING)]
    for job in sorted(open_jobs, key=lambda each: (each.status == RUNNING, -each.priority)):
        workers = wanted.get(job.id, 0)
        if job.status == RUNNING:
            if jobs[job.id].status == RUNNING:  # and has not just made room
                jobs[job.id] = _moving(room, jobs[job.id], workers, now)
            continue
        jobs[job.id] = _starting(room, job, workers, now)
        if jobs[job.id] is job and workers >= job.at_least and len(kept) < MOST_KEPT:
            kept[job.id] = _keep(state, room, jobs, kept, job, now)
    return replace(state, jobs=jobs), kept


def _keep(
    state: PoolState,
    room: FreePlaces,
    jobs: dict[str, PoolJob],
    kept: Mapping[str, KeptPlaces | None],
    job: PoolJob,
    now: float,
) -> KeptPlaces | None:
    """Keep places for a job that has none yet: others give some up, and get no more there."""
    taken, then = dict(room.taken), dict(jobs)
    for name, before in kept.items():
        if before is not None:  # as if it had them
            taken[name] = dict(before.places)
            workers = sum(before.places.values())
            had = replace(jobs[name], status=RUNNING, places=before.places)
            then[name] = replace(had, target=workers, seen=0.0)
    found = kept_for(state.hosts, then, taken, job, now)
    if found is not None:
        for name, places in found.gives.items():
            if name in jobs and jobs[name].status == RUNNING:
                jobs[name] = _with_places(jobs[name], places, now)
        for name, rest in found.rest.items():
            room.leave(name, rest)
    return found


def refusal(state: PoolState, job: PoolJob) -> str:
    """Why a job can never have its places on these hosts, all of them free; empty if it can."""
    most = room_on(state.hosts.values(), job)
    if most >= job.at_least:
        return ""
    return (
        f"the hosts have room for {most} workers with so much memory, and it needs {job.at_least}"
    )


def room_refusal(state: PoolState, job: PoolJob) -> str:
    """Why a job cannot have its places on the hosts just now; empty if it can."""
    room = FreePlaces(state.hosts, state.jobs, places_taken(state))
    found = sum(room.find(replace(job, reach=len(room.hosts)), job.at_least).values())
    if found >= job.at_least:
        return ""
    return f"room for {job.at_least} workers on hosts: there is some for {found} now"


def _giving(state: PoolState, job: PoolJob, workers: int, now: float) -> PoolJob:
    """A job that runs, with no more places than it is to have."""
    drained = [name for name in job.places if _is_drained(state, name)]
    begins_again = job.fixed or (job.local and job.kind != COMMAND)
    if not workers or (drained and begins_again):  # elsewhere, or here later
        return replace(job, status=STOPPING, target=0, places={}, changed=now)
    if workers >= job.target:
        return job
    places, more = dict(job.places), job.target - workers

    def last(name: str) -> tuple[bool, bool, int]:
        """Order hosts: those that drain, then those in reach, then by how few workers it has."""
        return name not in drained, state.hosts[name].away is not None, places[name]

    for name in sorted(places, key=last):
        given = min(more, places[name])
        places[name], more = places[name] - given, more - given
    return _with_places(job, places, now)


def _starting(room: FreePlaces, job: PoolJob, workers: int, now: float) -> PoolJob:
    """A job that waits, with all the places that it needs at least, or none."""
    if workers < job.at_least or room.has_any(job.id):
        return job  # its former processes are about to end
    if not (places := room.find_start(job, workers)):
        return job
    room.take(job, places)
    began = job.began if job.began is not None else now
    job = replace(job, status=RUNNING, told=places, began=began, reach=len(room.hosts))
    return _with_places(job, places, now)


def _moving(room: FreePlaces, job: PoolJob, workers: int, now: float) -> PoolJob:
    """A job that runs, with places instead of those that drain, and more if it is to grow."""
    stays = {n: w for n, w in job.places.items() if not room.is_drained(n)}
    leaves = {n: w for n, w in job.places.items() if n not in stays}
    grows = workers > job.target and now - job.changed >= GROW_S
    more = (workers if grows else job.target) - sum(stays.values())
    short = job.target < job.at_least
    if more <= 0 or not (leaves or grows):
        return job
    found = room.find(job, more)
    if job.fixed and grows:
        if sum(found.values()) < more:
            return job
        room.take(job, found)  # it goes on with more from its next start
        return replace(noted(job, now), status=STOPPING, target=0, places={}, changed=now)
    if not (found or leaves or short):
        return job
    places = {n: stays.get(n, 0) + found.get(n, 0) for n in {**stays, **found}}
    if sum(places.values()) < job.at_least:
        if not short:
            return job  # where it is, until there is room
        return replace(job, status=STOPPING, target=0, places={}, changed=now)
    room.take(job, found)
    return _with_places(job, places, now)


def _is_drained(state: PoolState, name: str) -> bool:
    return name not in state.hosts or state.hosts[name].closed


def _with_places(job: PoolJob, places: Mapping[str, int], now: float) -> PoolJob:
    kept = {name: workers for name, workers in places.items() if workers}
    status, target = job.status if kept else STOPPING, sum(kept.values())
    return replace(noted(job, now), status=status, places=kept, target=target, changed=now)
