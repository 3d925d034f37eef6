"""Hosts that are there only as long as jobs need them: which to start, and which to give back.

A pool asks for such a host when a job waits that has no room on those that are there, in the order
of its file, and gives it back when nothing has run there for some time. Ways in: `asked_for`,
`IdleHosts`, `HostsInVain`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from instep.pool.flows import READY, verdict
from instep.pool.hosts.free_places import FreePlaces, places_taken, room_of
from instep.pool.jobs import WAITING, HostSpec, PoolJob, PoolState
from instep.units import seconds_in

ASK_S = 2.0
"""A job has waited for so long before a host is started for it: others may shrink meanwhile."""

MOST_S = 3600.0
"""The longest pause before a host is started again for a job that did not come to it."""


def idle_s(spec: HostSpec) -> float:
    """Seconds without a worker after which a host is given back; infinite if it never is.

    Raises:
        ValueError: it is no duration.
    """
    return seconds_in(spec.idle) if spec.idle else math.inf


def asked_for(state: PoolState, now: float) -> dict[str, set[str]]:
    """The hosts on demand that are not there, and the jobs that wait for each.

    Args:
        state: of the pool.
        now: Unix seconds.
    """
    away = {name for name, host in state.hosts.items() if _is_askable(state, name)}
    if not away:
        return {}
    room = FreePlaces(state.hosts, state.jobs, places_taken(state))
    free = {name: room.free_on(name) for name in room.hosts if room.is_open(name) or name in away}
    names = sorted(free, key=lambda name: name in away)  # those that are there come first
    asked = defaultdict[str, set[str]](set)
    for job in _waiting(state, now):
        found, need = dict[str, int](), job.at_least
        for name in names:
            host = state.hosts[name]
            if need and (host.local or not job.local):
                most = room_of(host, *free[name], job) // job.unit * job.unit
                found[name] = min(need, most)
                need -= found[name]
        if need:
            continue
        for name, workers in found.items():
            cores, memory = free[name]
            free[name] = cores - workers, memory - workers * job.memory
            if workers and name in away:
                asked[name].add(job.id)
    return {name: asked[name] for name in state.hosts if name in asked}


def _is_askable(state: PoolState, name: str) -> bool:
    host = state.hosts[name]
    return host.on_demand and host.away is not None and not host.drained


def _waiting(state: PoolState, now: float) -> Iterator[PoolJob]:
    """The jobs that wait for room and nothing else, the first one first."""
    held: dict[str, int] = {}
    for job in state.jobs.values():
        held[job.share] = held.get(job.share, 0) + job.target
    waiting = (job for job in state.jobs.values() if job.open and job.status == WAITING)
    for job in sorted(waiting, key=lambda each: (-each.priority, each.submitted, each.id)):
        if now - max(job.submitted, job.changed) < ASK_S or verdict(job, state.jobs)[0] != READY:
            continue
        limit = state.limits.get(job.share)
        if limit is None or held[job.share] + job.at_least <= limit:
            held[job.share] += job.at_least
            yield job


class IdleHosts:
    """Notices hosts on demand on which nothing has run for some time.

    Args:
        limits_s: seconds of each; infinite for one that always stays.
    """

    def __init__(self, limits_s: Mapping[str, float]) -> None:
        self._limits_s = limits_s
        self._used: dict[str, float] = {}
        self.ran = set[str]()
        """Hosts on which something has run since they came."""

    def find(self, state: PoolState, now: float) -> list[str]:
        """Find those to give back.

        Args:
            state: of the pool.
            now: seconds of a clock that is never set.
        """
        busy = {name for places in places_taken(state).values() for name in places}
        self.ran |= busy
        self.ran -= {name for name, host in state.hosts.items() if host.away is not None}
        for name, host in state.hosts.items():
            if name in busy or host.away is not None:
                self._used[name] = now
        return [
            name
            for name in state.hosts
            if now - self._used.setdefault(name, now) > self._limits_s[name]
        ]


class HostsInVain:
    """Starts hosts less and less often for jobs that did not come to them, as others came first.

    Args:
        limits_s: as of `IdleHosts`.
    """

    def __init__(self, limits_s: Mapping[str, float]) -> None:
        self._limits_s = limits_s
        self._asked: dict[str, set[str]] = {}
        self._vain: dict[tuple[str, str], tuple[int, float]] = {}

    def due(self, asked: Mapping[str, set[str]], now: float) -> set[str]:
        """Choose those to start.

        Args:
            asked: the jobs that wait for each host.
            now: seconds of a clock that is never set.
        """
        self._asked.update(asked)
        never = 0, -math.inf
        return {
            name
            for name, jobs in asked.items()
            if any(now >= self._vain.get((name, job), never)[1] for job in jobs)
        }

    def given_back(self, name: str, now: float, *, ran: bool) -> None:
        """Note that a host was given back, and whether something had run there."""
        for job in self._asked.pop(name, ()):
            times = 0 if ran else self._vain.get((name, job), (0, 0.0))[0] + 1
            self._vain[name, job] = times, now + min(self._limits_s[name] * 2**times, MOST_S)
            if ran:
                del self._vain[name, job]
