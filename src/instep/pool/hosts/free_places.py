"""Places that are taken and free on the hosts of a pool. Ways in: `places_taken`, `FreePlaces`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from instep.pool.jobs import PoolHost, PoolJob, PoolState

Taken = dict[str, dict[str, int]]
"""Places that each job takes on each host, by job."""


def places_taken(state: PoolState) -> Taken:
    """Places that each job takes on each host, by job; of jobs that take any."""
    found: Taken = {}
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
        if job.seen_here and (machine := local_host(state)):
            here = found.setdefault(job_id, {})
            here[machine] = here.get(machine, 0) + max(0, job.seen_here - sum(here.values()))
    return found


def local_host(state: PoolState) -> str:
    """The first host that is the machine of the scheduler; empty if none is."""
    return next((name for name, host in state.hosts.items() if host.local), "")


def local_cores(state: PoolState) -> int:
    """Cores that jobs which run on the scheduler's machine alone can have."""
    if not state.hosts:
        return state.cores
    return sum(host.cores for host in state.hosts.values() if host.local and not host.closed)


class FreePlaces:
    """Places that are free on hosts, as they are taken.

    Args:
        hosts: of the pool, by name.
        jobs: of the pool, whose memory counts.
        taken: places that each job has.
    """

    def __init__(
        self, hosts: Mapping[str, PoolHost], jobs: Mapping[str, PoolJob], taken: Taken
    ) -> None:
        self.hosts, self.taken = hosts, {job: dict(places) for job, places in taken.items()}
        self._names = [*hosts]
        self._open = {n for n, host in hosts.items() if not host.closed and host.away is None}
        self._most: dict[tuple[int, int, bool], int] = {}  # workers of a kind, where they are few
        self._cores = {name: host.cores for name, host in hosts.items()}
        self._memory = {name: host.memory for name, host in hosts.items()}
        self._rest: dict[str, tuple[int, int]] = {}  # cores and memory that nobody waits for
        for job_id, places in taken.items():
            job = jobs.get(job_id)
            for name, workers in places.items():
                self._use(name, workers, job.memory if job is not None else 0)

    def is_drained(self, name: str) -> bool:
        """Whether nothing is to run on a host."""
        return name not in self.hosts or self.hosts[name].closed

    def is_open(self, name: str) -> bool:
        """Whether a host is in reach, and may get something."""
        return name in self._open

    def has_any(self, job: str) -> bool:
        """Whether a job that does not run still has processes on a host that is in reach."""
        return any(self.hosts[name].away is None for name in self.taken.get(job, ()))

    def find(self, job: PoolJob, workers: int) -> dict[str, int]:
        """Places for as many workers as there are, on few hosts, and where the job is already."""
        free = {
            name: self._room(name, job)
            for name in self._names[: job.reach]
            if name in self._open and (self.hosts[name].local or not job.local)
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

    def find_all(self, job: PoolJob) -> dict[str, int]:
        """Places for all workers without which a job does not start; none if they are too few."""
        return self.find_start(job, job.at_least)

    def find_start(self, job: PoolJob, workers: int) -> dict[str, int]:
        """Places for a job that begins with so many workers, or with its least; else none."""
        kind = job.memory, job.unit, job.local
        if self._most.get(kind, job.at_least) < job.at_least:
            return {}  # since another one of them was looked for, places were only taken
        found = self.find(replace(job, reach=len(self._names), places={}), workers)
        if (most := sum(found.values())) >= job.at_least:
            return found
        self._most[kind] = most
        return {}

    def take(self, job: PoolJob, places: Mapping[str, int]) -> None:
        """Take places."""
        here = self.taken.setdefault(job.id, {})
        for name, workers in places.items():
            here[name] = here.get(name, 0) + workers
            self._use(name, workers, job.memory)

    def free_on(self, name: str) -> tuple[int, int]:
        """Cores and memory that are free on a host."""
        return self._cores[name], self._memory[name]

    def leave(self, name: str, rest: tuple[int, int]) -> None:
        """Give no more on a host than some cores and memory: others wait for what is free."""
        known = self._rest.get(name, rest)
        self._rest[name] = min(known[0], rest[0]), min(known[1], rest[1])

    def _room(self, name: str, job: PoolJob) -> int:
        room = room_of(self.hosts[name], self._cores[name], self._memory[name], job)
        if name in self._rest:
            room = min(room, room_of(self.hosts[name], *self._rest[name], job))
        return room // job.unit * job.unit

    def _use(self, name: str, workers: int, memory: int) -> None:
        if name in self._cores:
            self._cores[name] -= workers
            self._memory[name] -= workers * memory
        if name in self._rest:
            cores, left = self._rest[name]
            self._rest[name] = cores - workers, left - workers * memory


def room_of(host: PoolHost, cores: int, memory: int, job: PoolJob) -> int:
    """Workers of a job for which a host has so many cores and so much memory left."""
    if host.memory and job.memory:
        cores = min(cores, memory // job.memory)
    return max(0, cores)


def room_on(hosts: Iterable[PoolHost], job: PoolJob) -> int:
    """Workers of a job for which hosts have room where nobody else has any."""
    fit = (host for host in hosts if host.local or not job.local)
    return sum(room_of(host, host.cores, host.memory, job) // job.unit * job.unit for host in fit)
