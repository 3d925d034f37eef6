"""On which hosts of a pool the workers of each job are: pure functions of its state.

How many workers a job is to have is decided elsewhere (`policy.py`). A place on a host is taken as
long as a job is to have a worker there, its run may start one there, or a process of it has not
ended there. A host that is out of reach gets nothing new, and what it had is taken to be there.
Ways in: `placed`, `with_hosts`, `after_host_event`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from instep.pool.jobs import (
    RUNNING,
    STOPPING,
    WAITING,
    DrainAsked,
    HostAway,
    HostSeen,
    PlacesTold,
    PoolHost,
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
        host = replace(host, away=None, workers=event.workers)
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
    if job.status != RUNNING or not job.places:
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


def places_taken(state: PoolState) -> dict[str, dict[str, int]]:
    """Places that each job takes on each host, by job; of jobs that take any."""
    found: dict[str, dict[str, int]] = {}
    for name, host in state.hosts.items():
        for job_id, workers in host.workers.items():
            if workers:
                found.setdefault(job_id, {})[name] = workers
    for job_id, job in state.jobs.items():
        for places in (job.places, job.told):
            for name, workers in places.items():
                if workers:
                    here = found.setdefault(job_id, {})
                    here[name] = max(here.get(name, 0), workers)
    return found


def with_hosts(state: PoolState, now: float) -> PoolState:
    """The state with the cores that each job has on hosts, and those that there are for all."""
    if not state.hosts:
        return state
    taken, jobs = places_taken(state), dict(state.jobs)
    for name, job in state.jobs.items():
        held = sum(taken.get(name, {}).values())
        if held != job.held:
            jobs[name] = replace(job, held=held)
    return replace(state, jobs=jobs, cores=_cores(state, now))


def _cores(state: PoolState, now: float) -> int:
    """Places that can be had, with those that jobs have on hosts which are out of reach."""
    cores = sum(
        host.cores
        for name, host in state.hosts.items()
        if not host.drained and not is_gone(state, name, now)
    )
    gone = {n for n, host in state.hosts.items() if not host.drained and is_gone(state, n, now)}
    kept = sum(job.places.get(n, 0) for job in state.jobs.values() if job.places for n in gone)
    return cores + kept


def placed(state: PoolState, wanted: Mapping[str, int], now: float) -> PoolState:
    """The state with places for the workers that jobs are to have, as far as there are any by now.

    All workers without which a job does not start are placed together, or none.

    Args:
        state: with what jobs have.
        wanted: workers of each open job.
        now: Unix seconds.
    """
    jobs = dict(state.jobs)
    for job in state.jobs.values():
        if job.status == RUNNING:
            jobs[job.id] = _giving(state, job, wanted.get(job.id, 0), now)
    room = _FreePlaces(replace(state, jobs=jobs))
    open_jobs = [job for job in jobs.values() if job.status in (WAITING, RUNNING)]
    for job in sorted(open_jobs, key=lambda each: (each.status == RUNNING, -each.priority)):
        if job.status == WAITING:
            jobs[job.id] = _starting(room, job, wanted.get(job.id, 0), now)
        else:
            jobs[job.id] = _moving(room, job, wanted.get(job.id, 0), now)
    return replace(state, jobs=jobs)


def refusal(state: PoolState, job: PoolJob) -> str:
    """Why a job can never have its places on these hosts, all of them free; empty if it can."""
    most = sum(_room_of(host, host.cores, host.memory, job) for host in state.hosts.values())
    if most >= job.at_least:
        return ""
    return (
        f"the hosts have room for {most} workers with so much memory, and it needs {job.at_least}"
    )


def room_refusal(state: PoolState, job: PoolJob) -> str:
    """Why a job cannot have its places on the hosts just now; empty if it can."""
    room = _FreePlaces(state)
    found = sum(room.find(replace(job, reach=len(room.hosts)), job.at_least).values())
    if found >= job.at_least:
        return ""
    return f"room for {job.at_least} workers on hosts: there is some for {found} now"


def _giving(state: PoolState, job: PoolJob, workers: int, now: float) -> PoolJob:
    """A job that runs, with no more places than it is to have."""
    drained = [name for name in job.places if _is_drained(state, name)]
    if not workers or (job.fixed and drained):  # it begins again elsewhere
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


def _starting(room: _FreePlaces, job: PoolJob, workers: int, now: float) -> PoolJob:
    """A job that waits, with all the places that it needs at least, or none."""
    if workers < job.at_least or room.has_any(job.id):
        return job  # its former processes are about to end
    places = room.find(replace(job, reach=len(room.hosts)), workers)
    if sum(places.values()) < job.at_least:
        return job
    room.take(job, places)
    began = job.began if job.began is not None else now
    job = replace(job, status=RUNNING, told=places, began=began, reach=len(room.hosts))
    return _with_places(job, places, now)


def _moving(room: _FreePlaces, job: PoolJob, workers: int, now: float) -> PoolJob:
    """A job that runs, with places instead of those that drain, and more if it is to grow."""
    stays = {n: w for n, w in job.places.items() if not room.is_drained(n)}
    leaves = {n: w for n, w in job.places.items() if n not in stays}
    grows = workers > job.target and now - job.changed >= GROW_S
    more = (workers if grows else job.target) - sum(stays.values())
    short = job.target < job.at_least
    if more <= 0 or not (leaves or grows):
        return job
    found = room.find(job, more)
    if not (found or leaves or short):
        return job
    places = {n: stays.get(n, 0) + found.get(n, 0) for n in {**stays, **found}}
    if sum(places.values()) < job.at_least:
        if not short:
            return job  # where it is, until there is room
        return replace(job, status=STOPPING, target=0, places={}, changed=now)
    room.take(job, found)
    return _with_places(job, places, now)


class _FreePlaces:
    """Places that are free on the hosts of a state, as they are taken."""

    def __init__(self, state: PoolState) -> None:
        self.hosts = state.hosts
        self._names = [*state.hosts]
        self._taken = places_taken(state)
        self._cores = {name: host.cores for name, host in state.hosts.items()}
        self._memory = {name: host.memory for name, host in state.hosts.items()}
        for job_id, places in self._taken.items():
            job = state.jobs.get(job_id)
            for name, workers in places.items():
                self._use(name, workers, job.memory if job is not None else 0)

    def is_drained(self, name: str) -> bool:
        """Whether nothing is to run on a host."""
        return name not in self.hosts or self.hosts[name].drained

    def has_any(self, job: str) -> bool:
        """Whether a job that does not run still has processes on a host that is in reach."""
        return any(self.hosts[name].away is None for name in self._taken.get(job, ()))

    def find(self, job: PoolJob, workers: int) -> dict[str, int]:
        """Places for as many workers as there are, on few hosts, and where the job is already."""
        free = {
            name: _room_of(self.hosts[name], self._cores[name], self._memory[name], job)
            for name in self._names[: job.reach]
            if not self.hosts[name].drained and self.hosts[name].away is None
        }
        found: dict[str, int] = {}
        while workers > 0 and (left := {n: w for n, w in free.items() if w > 0 and n not in found}):
            enough = {n: w for n, w in left.items() if w >= workers}
            there = [n for n in left if n in job.places]
            if there:
                name = max(there, key=left.__getitem__)
            elif enough:
                name = min(enough, key=enough.__getitem__)  # the tightest
            else:
                name = max(left, key=left.__getitem__)
            found[name] = min(workers, left[name])
            workers -= found[name]
        return found

    def take(self, job: PoolJob, places: Mapping[str, int]) -> None:
        """Take places."""
        for name, workers in places.items():
            self._use(name, workers, job.memory)

    def _use(self, name: str, workers: int, memory: int) -> None:
        if name in self._cores:
            self._cores[name] -= workers
            self._memory[name] -= workers * memory


def _room_of(host: PoolHost, cores: int, memory: int, job: PoolJob) -> int:
    """Workers of a job for which a host has so many cores and so much memory left."""
    if host.memory and job.memory:
        cores = min(cores, memory // job.memory)
    return max(0, cores)


def _is_drained(state: PoolState, name: str) -> bool:
    return name not in state.hosts or state.hosts[name].drained


def _with_places(job: PoolJob, places: Mapping[str, int], now: float) -> PoolJob:
    kept = {name: workers for name, workers in places.items() if workers}
    status, target = job.status if kept else STOPPING, sum(kept.values())
    return replace(noted(job, now), status=status, places=kept, target=target, changed=now)
