"""The hosts of a run: which are alive, which workers they have, and which are given up.

A run on this machine has one host. In a run on several, the master reaches a process of
another machine through its host only: the host sends it signals and reports its end. If
the host itself is silent, the process counts as lost once it cannot commit any more
(`comm/protocol/heartbeat_lease.py`, LEASE_S). What follows for the run is decided elsewhere.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Peer
from instep.control.hosts.host_numbers import HostNumbers
from instep.control.watch import away_s
from instep.system.limits import FLOOR_S
from instep.system.processes import Watched

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
        servers: numbers of the hosts that are for parameter servers alone.
    """

    def __init__(
        self,
        count: int,
        send: Callable[[Peer, m.AnyMessage], None],
        servers: Collection[int] = (),
    ) -> None:
        self.count, self._send = count, send
        self.several = count > 0
        """Whether the run is on machines that may lose each other."""
        self.numbers = HostNumbers(count, servers)
        self.first: float | None = None
        """When the first connected."""
        self.changes = Counter[int]()
        """How often each has connected, or was lost."""
        self.now = 0.0
        """The time of the last turn."""
        self._there: dict[int, _Host] = {}
        self._beating: set[tuple[int, int]] = set()  # host and pid: those with heartbeats
        self._abandoned: set[tuple[int, int]] = set()  # host and pid
        self._left: dict[int, float] = {}  # when a host that is not there was lost
        self._failed: set[int] = set()  # those that exited, and have not connected since
        # by number, machine and pid of each that has connected
        self._processes: dict[int, list[tuple[str, int]]] = {}
        self._missing_since: dict[int, float] = {}

    @property
    def missing(self) -> list[int]:
        """Numbers of the hosts that are not connected, without those that left or were given
        back."""
        return sorted(self.numbers.due - self._there.keys())

    def to_start(self, now: float) -> list[int]:
        """Hosts that have been missing for too long, and are to be started; each once a while."""
        since = {number: self._missing_since.get(number, now) for number in self.missing}
        late = [number for number, lost in since.items() if now - lost > REPLACED_S]
        again = now + (RETRY_S if self.several else 0.0)
        self._missing_since = since | dict.fromkeys(late, again)
        return late

    def remove(self, numbers: Collection[int]) -> list[Peer]:
        """These are no longer part of the run; the connections of those that are there."""
        self.numbers.remove(numbers)
        return [self._lose(number).peer for number in numbers if number in self._there]

    # ---- connections and heartbeats

    def turn(self, now: float) -> list[Peer]:
        """Let time pass; returns connections that have been silent for too long."""
        away, self.now = away_s(self.now or None, now), now
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
        self.first = self.first or now
        self._failed.discard(number)
        self.numbers.come_back(number)
        self._left.pop(number, None)
        before = self._there.get(number)
        self._there[number] = _Host(peer, pid, now, now)
        self.changes[number] += 1
        for host, abandoned in self._abandoned:
            if host == number:
                self._send(peer, m.Signal(pid=abandoned, signals=[signal.SIGKILL]))
        return before.peer if before is not None and before.pid == pid else None

    def fails(self, number: int) -> bool:
        """A host has ended by itself; whether all have, but for those that left or were given
        back."""
        self._failed.add(number)
        return self._failed >= self.numbers.due

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
        self._left[number] = self.now
        self.changes[number] += 1
        return self._there.pop(number)

    def _beats(self, number: int) -> bool:
        """Whether a host's process has sent a heartbeat before, on any connection."""
        return (number, self._there[number].pid) in self._beating

    # ---- hosts that can be used, and those that are given back

    @property
    def connected(self) -> Collection[int]:
        """Numbers of the hosts that are there."""
        return self._there.keys()

    @property
    def for_workers(self) -> list[int]:
        """Hosts that are there to stay, without those of servers."""
        return sorted(self._there.keys() - self.numbers.servers - self.numbers.going)

    def give_back(self, used: Collection[int], workers: int) -> int | None:
        """Give back a host without workers: one that is about to go, or one too many.

        Args:
            used: hosts that have workers, or start one.
            workers: how many the run shall have.

        Returns:
            Its number; None if there is none. What it does from now on concerns nobody.
        """
        empty, number = self._there.keys() - {*used, *self.numbers.servers}, None
        if going := empty & self.numbers.draining:
            number = min(going)
        elif empty and len(self.for_workers) > workers and self.all_settled:
            number = max(empty)
        if number is not None:
            del self._there[number]
            self.numbers.give_back(number)
        return number

    @property
    def all_settled(self) -> bool:
        """Whether all hosts have been there for a while."""
        return all(self.now - host.since >= BALANCE_S for host in self._there.values())

    # ---- processes on other machines

    def send(self, host: int, message: m.AnyMessage) -> None:
        """Send a host a message, if it is there."""
        if host in self._there:
            self._send(self._there[host].peer, message)

    def is_stopped(self, host: int, pid: int) -> bool:
        """Whether a host has said that a process of its was stopped."""
        return host in self._there and pid in self._there[host].stopped

    def is_quiet(self, number: int) -> bool:
        """Whether a host is not there, or its heartbeat is late."""
        host = self._there.get(number)
        return host is None or (self._beats(number) and self.now - host.last_heartbeat > QUIET_S)

    def is_gone(self, number: int) -> bool:
        """Whether a host has not been there for so long that it will hardly be in a moment."""
        return number in self._left and self.now - self._left[number] > BACK_S

    @property
    def all_quiet(self) -> bool:
        """Whether all are silent, so that it is likely the master that is cut off."""
        return self.several and all(map(self.is_quiet, self.numbers.all))

    @property
    def can_do_without(self) -> bool:
        """Whether a host has been there for long enough to take the work of others."""
        living = [n for n in self._there if not self.is_quiet(n)]
        return any(self.now - self._there[number].since > BACK_S for number in living)

    def abandon(self, host: int, pid: int) -> None:
        """Continue without this process; it is killed once its host can be reached."""
        self._abandoned.add((host, pid))
        self.send(host, m.Signal(pid=pid, signals=[signal.SIGKILL]))

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
        self._hosts.send(self.host, m.Signal(pid=self.pid, signals=[number]))

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
