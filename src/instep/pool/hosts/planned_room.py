"""Room for the workers that a policy deals, as if nothing had to end first.

Way in: `PlannedRoom`.
"""

from __future__ import annotations

from msgspec.structs import replace

from instep.pool.hosts.free_places import FreePlaces
from instep.pool.jobs import WAITING, PoolJob, PoolState


class PlannedRoom:
    """Places on the hosts of a pool for workers that jobs are given, one job after the other.

    A job takes the places that it has, and then free ones. So nobody is given a worker for which no
    host has memory, while another job could have the core.

    Args:
        state: of a pool with hosts.
    """

    def __init__(self, state: PoolState) -> None:
        self._room = FreePlaces(state.hosts, state.jobs, {})
        self._full: set[tuple[int, int, bool]] = set()  # kinds of jobs; there is less and less room

    def take(self, job: PoolJob, workers: int) -> None:
        """Take places for so many more workers, as far as there are any."""
        own: dict[str, int] = {}
        for name, had in self._own(job).items():
            own[name] = min(workers, had)
            workers -= own[name]
        self._room.take(job, own)
        if workers:
            self._room.take(job, self._found(job, workers))

    def has(self, job: PoolJob, workers: int) -> bool:
        """Whether there are places for so many more workers."""
        more, kind = workers - sum(self._own(job).values()), (job.memory, job.unit, job.local)
        if more <= 0:
            return True
        if kind in self._full:
            return False
        found = sum(self._found(job, more).values())
        if not found and job.status == WAITING:  # it may be anywhere
            self._full.add(kind)
        return found >= more

    def _own(self, job: PoolJob) -> dict[str, int]:
        taken = self._room.taken.get(job.id, {})
        return {name: max(0, had - taken.get(name, 0)) for name, had in job.places.items()}

    def _found(self, job: PoolJob, workers: int) -> dict[str, int]:
        if job.status == WAITING:
            job = replace(job, reach=len(self._room.hosts))
        return self._room.find(job, workers)
