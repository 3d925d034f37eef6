"""The hosts of a run: which are alive, which workers they have, and which are given up.

A run on this machine has one host. In a run on several, the master reaches a process of
another machine through its host only: the host sends it signals and reports its end. If
the host itself is silent, the process counts as lost once it cannot commit any more
(`comm/protocol/connection.py`, LEASE_S). What follows for the run is decided elsewhere.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from instep.comm.encryption.certificates import Credentials, Identity
from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Peer
from instep.control.decisions.phases import Role
from instep.control.watch import away_s
from instep.job.mesh import MeshSpec
from instep.system.limits import FLOOR_S
from instep.system.processes import Watched

GATHER_S = 10.0
"""How long the first workers wait for hosts that have not come."""

QUIET_S = 0.6
"""A host that is silent for so long will hardly report the end of its processes."""

FIRST_HEARTBEAT_S = 60.0
"""How long a host may take to import what workers need; it is silent meanwhile."""

BALANCE_S = 3.0
"""How long all hosts must have been there before a worker moves to one that has fewer."""

LAST_S = 30.0
"""How long workers that alone hold the run's state, and servers that alone hold a part of it, are
waited for; then it goes back, or ends."""

BACK_S = 2.0
"""How long a host must be there before workers of another one are given up."""

REPLACED_S = 1.0
"""How long the spare of a host that was lost may take to connect, before a new one is started."""

RETRY_S = 4.0
"""After how much longer a host on another machine is started again."""


def together(mesh: MeshSpec, room: int) -> int:
    """How many processes that follow each other start on one host.

    A whole replica, or the largest part of one that fits; at least those on the `tensor` axis.

    Args:
        mesh: of the replica.
        room: processes on each host, where they are spread evenly.
    """
    sizes = range(mesh.ranks, 0, -mesh.tensor)
    return next((n for n in sizes if mesh.ranks % n == 0 and n <= room), mesh.tensor)


class Process(Protocol):
    """A worker's process, as the master sees it."""

    pid: int
    host: int
    """The number of its host."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, as far as can be seen."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped, as by SIGSTOP, as far as can be seen."""

    def signal(self, number: int) -> None:
        """Send it a signal, if it can be reached."""

    def close(self) -> None:
        """Nothing more is asked."""


@dataclass
class _Host:
    """One that is connected."""

    peer: Peer
    pid: int
    since: float
    last_heartbeat: float
    stopped: Collection[int] = ()
    """Its processes that were stopped, by its last heartbeat."""


class Hosts:
    """The hosts of a run.

    Args:
        count: how many it has from the start, numbered from 0; 0 where all workers are on this
            machine.
        send: sends a message to one of them.
        gather_s: how long the first that connects waits for the others.
        mesh: of a replica, whose processes are best kept together.
        servers: numbers of the hosts that are for parameter servers alone.
        issue: what a process is to show; None where connections are not encrypted.
    """

    def __init__(
        self,
        count: int,
        send: Callable[[Peer, m.AnyMessage], None],
        *,
        gather_s: float = GATHER_S,
        mesh: MeshSpec,
        servers: Collection[int] = (),
        issue: Callable[[Identity], Credentials | None] = lambda _: None,
    ) -> None:
        self._servers = frozenset(servers)
        self.count, self._send, self._gather_s, self._mesh = count, send, gather_s, mesh
        self._issue = issue
        self._numbers = set(range(max(1, count)))
        self._retired: set[int] = set()  # also those that have left
        self._there: dict[int, _Host] = {}
        self._underway: dict[int, int] = {}  # worker to the host that was asked to start it
        self._beating: set[tuple[int, int]] = set()  # host and pid: those with heartbeats
        self._abandoned: set[tuple[int, int]] = set()  # host and pid
        self._left: dict[int, float] = {}  # when a host that is not there was lost
        self._failed: set[int] = set()  # those that exited, and have not connected since
        # by number, machine and pid of each that has connected
        self._processes: dict[int, list[tuple[str, int]]] = {}
        self._draining: frozenset[int] = frozenset()  # their machines are about to go
        self._given_back: set[int] = set()
        self._missing_since: dict[int, float] = {}
        self._first: float | None = None
        self._ready = self._said_ready = False
        self._now = 0.0

    @property
    def several(self) -> bool:
        """Whether the run is on machines that may lose each other."""
        return self.count > 0

    @property
    def missing(self) -> list[int]:
        """Numbers of the hosts that are not connected, without those that left or were given
        back."""
        return sorted(self._numbers - self._retired - self._given_back - self._there.keys())

    def to_start(self, now: float) -> list[int]:
        """Hosts that have been missing for too long, and are to be started; each once a while."""
        since = {number: self._missing_since.get(number, now) for number in self.missing}
        late = [number for number, lost in since.items() if now - lost > REPLACED_S]
        again = now + (RETRY_S if self.several else 0.0)
        self._missing_since = since | dict.fromkeys(late, again)
        return late

    def is_there(self, number: int) -> bool:
        """Whether a host is connected."""
        return number in self._there

    @property
    def _going(self) -> set[int]:
        """Hosts on which nothing is to be started any more."""
        return self._retired | self._draining

    # ---- hosts that come and leave while the run is running

    def add(self, numbers: Collection[int]) -> None:
        """The run has these hosts too, once they have connected."""
        self._numbers |= set(numbers)

    def retire(self, numbers: Collection[int]) -> None:
        """No further worker starts on these, and they are not missed."""
        self._retired |= set(numbers)

    def remove(self, numbers: Collection[int]) -> list[Peer]:
        """These are no longer part of the run; the connections of those that are there."""
        self.retire(numbers)
        self._numbers -= set(numbers)
        return [self._lose(number).peer for number in numbers if number in self._there]

    def has_left(self, number: int) -> bool:
        """Whether a host was removed."""
        return number in self._retired and number not in self._numbers

    def are_idle(self, numbers: Collection[int]) -> bool:
        """Whether no worker is being started on any of these."""
        return not any(host in numbers for host in self._underway.values())

    @property
    def now(self) -> float:
        """The time of the last turn."""
        return self._now

    # ---- connections and heartbeats

    def turn(self, now: float) -> list[Peer]:
        """Let time pass; returns connections that have been silent for too long."""
        away, self._now = away_s(self._now or None, now), now
        for host in self._there.values():
            host.last_heartbeat += away
        if not self.several:
            return []
        return [
            host.peer
            for number, host in self._there.items()
            if now - host.last_heartbeat > (FLOOR_S if self._beats(number) else FIRST_HEARTBEAT_S)
        ]

    def was_replaced(self, number: int, machine: str, pid: int) -> bool:
        """Whether another process has come for a host after this one, which was cut off."""
        known = self._processes.get(number, [])
        return (machine, pid) in known[:-1]

    def joins(
        self, peer: Peer, number: int, pid: int, now: float, machine: str = ""
    ) -> Peer | None:
        """A host has connected; it kills what was given up meanwhile.

        Returns:
            Its former connection, where the same process had another.
        """
        known = self._processes.setdefault(number, [])
        if (machine, pid) not in known:
            known.append((machine, pid))
        self._first = self._first or now
        self._failed.discard(number)
        self._given_back.discard(number)
        self._left.pop(number, None)
        before = self._there.get(number)
        self._there[number] = _Host(peer, pid, now, now)
        self._forget_starts(number)  # it may not have got what was sent on a lost connection
        for host, abandoned in self._abandoned:
            if host == number:
                self._send(peer, m.Signal(pid=abandoned, signals=[signal.SIGKILL]))
        return before.peer if before is not None and before.pid == pid else None

    def fails(self, number: int) -> bool:
        """A host has ended by itself; whether all have, but for those that left or were given
        back."""
        self._failed.add(number)
        return self._failed >= self._numbers - self._retired - self._given_back

    def heartbeat(self, number: int, peer: Peer, now: float, stopped: Collection[int] = ()) -> None:
        """A heartbeat of a host, with its processes that were stopped."""
        host = self._there.get(number)
        if host is not None and host.peer is peer:
            host.last_heartbeat, host.stopped = now, stopped
            self._beating.add((number, host.pid))

    def leaves(self, number: int, peer: Peer) -> bool:
        """A host's connection is lost; whether there is no other with its number."""
        host = self._there.get(number)
        if host is None or host.peer is not peer:
            return False
        self._lose(number)
        return True

    def _lose(self, number: int) -> _Host:
        self._left[number] = self._now
        self._forget_starts(number)
        return self._there.pop(number)

    def _forget_starts(self, number: int) -> None:
        self._underway = {w: h for w, h in self._underway.items() if h != number}

    def _beats(self, number: int) -> bool:
        """Whether a host's process has sent a heartbeat before, on any connection."""
        return (number, self._there[number].pid) in self._beating

    # ---- where workers are

    def ready(self, now: float) -> bool:
        """Whether workers may be started: all hosts have connected, or have timed out."""
        late = self._first is not None and now - self._first > self._gather_s
        self._ready |= late or (self._first is not None and not (self.several and self.missing))
        return self._ready

    def has_become_ready(self, now: float) -> bool:
        """Whether workers may be started, and this was not said before."""
        before, self._said_ready = self._said_ready, self.ready(now)
        return self._said_ready and not before

    def may_start(self, worker: int) -> bool:
        """Whether hosts are ready to start a worker, and none has been asked to."""
        return self.ready(self._now) and not (self.several and worker in self._underway)

    def start(
        self,
        worker: int,
        log: str,
        placed: Mapping[int, int],
        role: Role = "worker",
        *,
        of: int = 0,
        home: int | None = None,
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
        """
        if not self.may_start(worker):
            return
        there = {**placed, **self._underway}
        # it is not started later: the only host, which is slow, gets the message in its time
        living = [n for n in self._there if not (self.several and self.is_quiet(n))]
        living = [n for n in living if n not in self._going] or living
        if self._servers:  # each role on its own hosts, as long as there is one
            fit = [n for n in living if (n in self._servers) == (role == "server")]
            living = fit or living
        size = together(self._mesh, -(-of // max(1, len(living))))
        near = Counter(host for n, host in there.items() if n // size == worker // size)
        workers = Counter(there.values())
        best = min(living, key=lambda n: (-near[n], workers[n], n), default=None)
        host = home if home in living else best
        if host is not None:
            self._underway[worker] = host
            shown = self._issue(Identity(role, worker, host))
            order = m.StartWorker(number=worker, log=log, role=role, credentials=shown)
            self._send(self._there[host].peer, order)

    def started(self, worker: int, host: int) -> bool:
        """A worker has connected, or ended before that; whether it was to be started there."""
        if self._underway.get(worker) != host:
            return not self.several
        del self._underway[worker]
        return True

    def crowded(self, placed: Mapping[int, int], stay: Collection[int] = frozenset()) -> int | None:
        """A worker that should move to another host; None if they are spread evenly.

        Args:
            placed: worker to its host.
            stay: those that do not move.
        """
        if not self.several or any(map(self.is_quiet, self._there)):
            return None
        if not self._all_settled():
            return None
        workers = Counter(placed.values())
        there = self._for_workers()
        fullest = max(there, key=lambda number: workers[number], default=0)
        fewest = min((workers[number] for number in there), default=0)
        if workers[fullest] - fewest < 2:
            return None
        movable = (worker for worker, host in placed.items() if host == fullest)
        return max((worker for worker in movable if worker not in stay), default=None)

    def _for_workers(self) -> list[int]:
        """Hosts that are there to stay, without those of servers."""
        return [n for n in sorted(self._there) if n not in self._servers and n not in self._going]

    # ---- hosts that go, and those that are given back

    def drain(self, numbers: Collection[int]) -> None:
        """The machines of these hosts, and of no others, are about to go.

        Unlike retired hosts, these may start again, on other machines; the run keeps its number of
        workers.
        """
        self._draining = frozenset(numbers)

    def to_move(self, placed: Mapping[int, int], stay: Collection[int]) -> list[int]:
        """Workers on hosts that are about to go, where another host can take them.

        Args:
            placed: worker to its host.
            stay: those that do not move.
        """
        if all(map(self.is_quiet, self._for_workers())):
            return []
        return [w for w, host in sorted(placed.items()) if host in self._draining and w not in stay]

    def give_back(self, used: Collection[int], workers: int) -> int | None:
        """Give back a host without workers: one that is about to go, or one too many.

        Args:
            used: hosts that have workers.
            workers: how many the run shall have.

        Returns:
            Its number; None if there is none. What it does from now on concerns nobody.
        """
        busy = {*used, *self._underway.values(), *self._servers}
        empty, number = self._there.keys() - busy, None
        if going := empty & self._draining:
            number = min(going)
        elif empty and len(self._for_workers()) > workers and self._all_settled():
            number = max(empty)
        if number is not None:
            del self._there[number]
            self._given_back.add(number)
        return number

    def _all_settled(self) -> bool:
        """Whether all hosts have been there for a while."""
        return all(self._now - host.since >= BALANCE_S for host in self._there.values())

    def take_again(self, workers: int) -> None:
        """Have a host for each worker, if so many were given back; they are missing then."""
        most = self.count - len(self._servers)
        while self._given_back and most - len(self._given_back) < workers:
            self._given_back.remove(min(self._given_back))

    # ---- processes on other machines

    def signal(self, host: int, pid: int, number: int) -> None:
        """Have a host send a signal to a process, if it is there."""
        if host in self._there:
            self._send(self._there[host].peer, m.Signal(pid=pid, signals=[number]))

    def is_stopped(self, host: int, pid: int) -> bool:
        """Whether a host has said that a process of its was stopped."""
        return host in self._there and pid in self._there[host].stopped

    def is_quiet(self, number: int) -> bool:
        """Whether a host is not there, or its heartbeat is late."""
        host = self._there.get(number)
        return host is None or (self._beats(number) and self._now - host.last_heartbeat > QUIET_S)

    def is_gone(self, number: int) -> bool:
        """Whether a host has not been there for so long that it will hardly be in a moment."""
        return number in self._left and self._now - self._left[number] > BACK_S

    @property
    def all_quiet(self) -> bool:
        """Whether all are silent, so that it is likely the master that is cut off."""
        return self.several and all(map(self.is_quiet, self._numbers))

    @property
    def can_do_without(self) -> bool:
        """Whether a host has been there for long enough to take the work of others."""
        living = [n for n in self._there if not self.is_quiet(n)]
        return any(self._now - self._there[number].since > BACK_S for number in living)

    def abandon(self, host: int, pid: int) -> None:
        """Continue without this process; it is killed once its host can be reached."""
        self._abandoned.add((host, pid))
        self.signal(host, pid, signal.SIGKILL)

    def is_abandoned(self, host: int, pid: int) -> bool:
        """Whether the run has continued without this process."""
        return (host, pid) in self._abandoned


class LocalProcess(Watched):
    """A process of the master's machine."""

    def __init__(self, host: int, pid: int) -> None:
        super().__init__(pid)
        self.host = host


class RemoteProcess:
    """A process of another machine, reached through its host only."""

    def __init__(self, hosts: Hosts, host: int, pid: int) -> None:
        self._hosts, self.host, self.pid = hosts, host, pid
        self.killed_at: float | None = None
        """When the master had it killed; from then on it gets no answers."""

    @property
    def ended(self) -> bool:
        """As its host reports."""
        return False

    @property
    def stopped(self) -> bool:
        """As its host reports."""
        return self._hosts.is_stopped(self.host, self.pid)

    def signal(self, number: int) -> None:
        """Ask its host."""
        if number == signal.SIGKILL:
            if self.killed_at is not None:
                return
            self.killed_at = self._hosts.now
        self._hosts.signal(self.host, self.pid, number)

    def is_lost(self, now: float, silent_s: float) -> bool:
        """Whether it cannot commit any more, though its end is not known.

        Args:
            now: seconds, on the master's clock.
            silent_s: since its last heartbeat.
        """
        if self.killed_at is None or not self._hosts.can_do_without:
            return False
        quiet = self._hosts.is_quiet(self.host) and silent_s > FLOOR_S
        return quiet or now - self.killed_at > FLOOR_S

    def close(self) -> None:
        """There is nothing to close."""
