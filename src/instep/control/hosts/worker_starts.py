"""The host on which each worker starts, and the workers that are better moved to another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from instep.comm.encryption.certificates import Credentials, Identity
from instep.comm.protocol import messages as m
from instep.control.decisions.phases import Role
from instep.control.hosts.hosts import Hosts
from instep.job.mesh import MeshSpec

GATHER_S = 10.0
"""How long the first workers wait for hosts that have not come."""


def together(mesh: MeshSpec, room: int) -> int:
    """How many processes that follow each other start on one host.

    A whole replica, or the largest part of one that fits; at least those on the `tensor` axis.

    Args:
        mesh: of the replica.
        room: processes on each host, where they are spread evenly.
    """
    sizes = range(mesh.ranks, 0, -mesh.tensor)
    return next((n for n in sizes if mesh.ranks % n == 0 and n <= room), mesh.tensor)


class WorkerStarts:
    """The workers that hosts have been asked to start.

    Args:
        hosts: of the run.
        gather_s: how long the first that connects waits for the others.
        mesh: of a replica, whose processes are best kept together.
        issue: what a process is to show; None where connections are not encrypted.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        gather_s: float = GATHER_S,
        mesh: MeshSpec,
        issue: Callable[[Identity], Credentials | None] = lambda _: None,
    ) -> None:
        self._hosts, self._gather_s, self._mesh, self._issue = hosts, gather_s, mesh, issue
        self._asked: dict[int, tuple[int, int]] = {}  # by worker: its host, and `changes` of that
        self._ready = self._said_ready = False

    def _host_of(self, worker: int) -> int | None:
        """The host that was asked to start it; it may not have got what was sent on a connection
        that was lost since."""
        host, seen = self._asked.get(worker, (None, 0))
        return host if host is not None and self._hosts.changes[host] == seen else None

    @property
    def _underway(self) -> dict[int, int]:
        """Worker to its host."""
        hosts = {worker: self._host_of(worker) for worker in self._asked}
        return {worker: host for worker, host in hosts.items() if host is not None}

    @property
    def hosts(self) -> set[int]:
        """Numbers of the hosts that are starting a worker."""
        return set(self._underway.values())

    def ready(self, now: float) -> bool:
        """Whether workers may be started: all hosts have connected, or have timed out."""
        hosts, first = self._hosts, self._hosts.first
        late = first is not None and now - first > self._gather_s
        self._ready |= late or (first is not None and not (hosts.several and hosts.missing))
        return self._ready

    def has_become_ready(self, now: float) -> bool:
        """Whether workers may be started, and this was not said before."""
        before, self._said_ready = self._said_ready, self.ready(now)
        return self._said_ready and not before

    def may_start(self, worker: int) -> bool:
        """Whether hosts are ready to start a worker, and none has been asked to."""
        ready = self.ready(self._hosts.now)
        return ready and not (self._hosts.several and self._host_of(worker) is not None)

    def start(
        self,
        worker: int,
        log: str,
        placed: Mapping[int, int],
        role: Role = "worker",
        *,
        of: int = 0,
        home: int | None = None,
        apart: Collection[int] = (),
    ) -> None:
        """Start a worker, unless that is under way.

        On the host that has the fewest; the processes of a replica where the others are
        (`together`).

        Args:
            worker: its number.
            log: takes its output.
            placed: worker to its host, of each that is there to stay.
            role: what it will be.
            of: how many workers the run shall have.
            home: the host where the process before it left memory, if it did; that one is
                preferred.
            apart: members that need no place.
        """
        if not self.may_start(worker):
            return
        hosts, there = self._hosts, {**placed, **self._underway}
        # it is not started later: the only host, which is slow, gets the message in its time
        living = [n for n in hosts.connected if not (hosts.several and hosts.is_quiet(n))]
        living = [n for n in living if n not in hosts.numbers.going] or living
        if servers := hosts.numbers.servers:  # each role on its own hosts, as long as there is one
            fit = [n for n in living if (n in servers) == (role == "server")]
            living = fit or living
        if role == "worker":
            room = self._room({n: host for n, host in there.items() if n not in apart})
            living = [n for n in living if room(n)]
        size = together(self._mesh, -(-of // max(1, len(living))))
        near = Counter(host for n, host in there.items() if n // size == worker // size)
        workers = Counter(there.values())
        best = min(living, key=lambda n: (-near[n], workers[n], n), default=None)
        host = home if home in living else best
        if host is not None:
            self._asked[worker] = host, hosts.changes[host]
            shown = self._issue(Identity(role, worker, host))
            order = m.StartWorker(number=worker, log=log, role=role, credentials=shown)
            hosts.send(host, order)

    def _room(self, there: Mapping[int, int]) -> Callable[[int], int]:
        """How many more workers there is room for on a host; at least one where nobody says.

        Args:
            there: worker to its host.
        """
        places, workers = self._hosts.numbers.places, Counter(there.values())
        if places is None:
            return lambda _: 1
        return lambda host: max(0, places.get(host, 0) - workers[host])

    def beyond(self, placed: Mapping[int, int]) -> list[int]:
        """Workers for which there is no room on their hosts, the newest of each.

        Args:
            placed: worker to its host.
        """
        places = self._hosts.numbers.places
        if places is None:
            return []
        by_host: dict[int, list[int]] = {}
        for worker, host in sorted(placed.items()):
            by_host.setdefault(host, []).append(worker)
        return [w for host, each in by_host.items() for w in each[places.get(host, 0) :]]

    def started(self, worker: int, host: int) -> bool:
        """A worker has connected, or ended before that; whether it was to be started there."""
        if self._host_of(worker) != host:
            return not self._hosts.several
        del self._asked[worker]
        return True

    def crowded(self, placed: Mapping[int, int], stay: Collection[int] = frozenset()) -> int | None:
        """A worker that should move to another host; None if they are spread evenly.

        Args:
            placed: worker to its host.
            stay: those that do not move.
        """
        hosts = self._hosts
        quiet = any(map(hosts.is_quiet, hosts.connected))
        placed_by_others = hosts.numbers.places is not None
        if quiet or placed_by_others or not (hosts.several and hosts.all_settled):
            return None
        workers = Counter(placed.values())
        there = hosts.for_workers
        fullest = max(there, key=lambda number: workers[number], default=0)
        fewest = min((workers[number] for number in there), default=0)
        if workers[fullest] - fewest < 2:
            return None
        movable = (worker for worker, host in placed.items() if host == fullest)
        return max((worker for worker in movable if worker not in stay), default=None)

    def to_move(self, placed: Mapping[int, int], stay: Collection[int]) -> list[int]:
        """Workers on hosts that are about to go or have no room, where another can take them.

        Args:
            placed: worker to its host.
            stay: those that do not move.
        """
        if all(map(self._hosts.is_quiet, self._hosts.for_workers)):
            return []
        if self._hosts.numbers.places is not None:
            workers = {w: host for w, host in placed.items() if w not in stay}
            room = self._room({**workers, **self._underway})
            return self.beyond(workers)[: sum(map(room, self._hosts.for_workers))]
        draining = self._hosts.numbers.draining
        return [w for w, host in sorted(placed.items()) if host in draining and w not in stay]
