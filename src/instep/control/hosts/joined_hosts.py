"""Hosts that join a running run, and the client that starts them and looks after them.

`instep join-run` brings them. The run has more workers while they are there. When their client
wants to go, or sends nothing any more, other hosts take the workers over. How workers are started
and placed is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import msgspec

from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Peer
from instep.control.decisions.events import Event, HostJoined, Noticed, Scaled
from instep.control.decisions.membership import refuse_scale
from instep.control.decisions.state import State
from instep.control.hosts.hosts import Hosts
from instep.control.hosts.worker_starts import GATHER_S, WorkerStarts
from instep.job.spec import JobSpec

KEY = "joined-hosts"
"""Of what another master must know."""

LOST_S = 5.0
"""A client that sends nothing for so long has left."""

LEAVE_S = 20.0
"""How long hosts that are about to go are kept for workers that have not left them. It is less than
the 30 s that Slurm gives a job to end."""


class Group(msgspec.Struct):
    """Hosts that came together."""

    numbers: list[int]
    workers: int
    """How many workers more the run has with them."""
    counted: bool = False
    """Whether it has them."""
    leaving: bool = False
    left: bool = False

    @property
    def client(self) -> int:
        """The number of their client: 0 submitted the run, and 1 only asks for something."""
        return self.numbers[0] + 1


class JoinedHosts:
    """Those of one run.

    Args:
        hosts: all hosts of the run.
        starts: of workers there.
        job: as run.
        send: sends a message to a client or a host.
        emit: writes an event to the log.
        keep: keeps a value for another master.
    """

    def __init__(
        self,
        hosts: Hosts,
        starts: WorkerStarts,
        job: JobSpec,
        *,
        send: Callable[[Peer, m.AnyMessage], None],
        emit: Callable[[str, Mapping[str, object]], None],
        keep: Callable[[str, bytes], None],
    ) -> None:
        self._hosts, self._starts, self._job = hosts, starts, job
        self._send, self._emit, self._keep = send, emit, keep
        self._groups: list[Group] = []
        # by client
        self._peers: dict[int, Peer] = {}
        self._last_heartbeat: dict[int, float] = {}
        self._since: dict[int, float] = {}  # since when hosts are there, or about to leave
        self._told: set[int] = set()  # clients that know that all their hosts are late

    def restore(self, value: bytes, now: float) -> None:
        """Know what the master before knew."""
        self._groups = msgspec.msgpack.decode(value, type=list[Group])
        for group in self._groups:
            self._hosts.numbers.add(group.numbers)
            self._last_heartbeat[group.client] = self._since[group.client] = now
            if group.leaving:
                self._hosts.numbers.retire(group.numbers)
            if group.left:
                self._hosts.remove(group.numbers)

    def _save(self) -> None:
        self._keep(KEY, msgspec.msgpack.encode(self._groups))

    # ---- clients

    def add(self, state: State, count: int, workers: int, now: float) -> Group | str:
        """Have so many hosts, once they connect; or why not."""
        wanted = len(state.wanted - state.servers) + workers
        if not self._hosts.several:
            return "this run is on one machine, and listens where no other can reach it."
        if not (1 <= count < 1 << 12 and workers >= 0):
            return f"{count} hosts and {workers} workers: needs 1 host or more, and no less than 0."
        once_ready = replace(state, course=state.course or 1)
        if refusal := refuse_scale(once_ready, self._job, wanted):
            return f"{workers} more than now: {refusal}" if workers else refusal
        numbers = [n for group in self._groups for n in group.numbers]
        first = max(numbers, default=self._hosts.count - 1) + 1
        group = Group([*range(first, first + count)], workers)
        self._groups.append(group)
        self._last_heartbeat[group.client] = self._since[group.client] = now
        self._hosts.numbers.add(group.numbers)
        self._emit("hosts_added", {"hosts": group.numbers, "workers": workers})
        self._save()
        return group

    def is_client(self, number: int) -> bool:
        """Whether hosts that are there have this client."""
        return any(group.client == number and not group.left for group in self._groups)

    def heartbeat(self, client: int, peer: Peer, now: float) -> None:
        """A client has connected, or shown that it lives."""
        self._peers[client], self._last_heartbeat[client] = peer, now

    def closed(self, peer: Peer) -> None:
        """A client's connection is closed; it may come back."""
        self._peers = {number: each for number, each in self._peers.items() if each is not peer}

    def ask_for(self, numbers: Collection[int], others: Peer | None) -> None:
        """Have clients start hosts that are missing; `others` has those of the run's start."""
        left = set(numbers)
        for group in self._groups:
            own = left.intersection(group.numbers)
            left -= own
            if own and group.client in self._peers:
                self._send(self._peers[group.client], m.HostWanted(numbers=sorted(own)))
        if left and others is not None:
            self._send(others, m.HostWanted(numbers=sorted(left)))

    # ---- time passes

    def turn(
        self, state: Callable[[], State], placed: Mapping[int, int], now: float
    ) -> Iterator[Event]:
        """Have more workers once hosts are there, and fewer before they go.

        Args:
            state: of the run, now.
            placed: worker to its host, of each process.
            now: seconds, on the master's clock.
        """
        for group in self._groups:
            client = group.client
            if group.left:
                continue
            if not group.leaving and now - self._last_heartbeat[client] > LOST_S:
                self.leave(client, now, f"their client was silent for {LOST_S:g} s")
            if group.leaving:
                yield from self._clear(group, state, placed, now)
            elif not group.counted and state().course:
                yield from self._gather(group, state, now)

    def _gather(self, group: Group, state: Callable[[], State], now: float) -> Iterator[Event]:
        """Have more workers once all hosts are there, or some are and the others late."""
        client = group.client
        missing = sorted(set(group.numbers).intersection(self._hosts.missing))
        late = now - self._since[client] > GATHER_S
        if not missing or (late and len(missing) < len(group.numbers)):
            yield from self._count(group, state)
        elif not late or client in self._told:
            return
        if client in self._peers:
            self._told.add(client)
            workers = group.workers if group.counted else 0
            self._send(self._peers[client], m.HostsJoined(workers=workers, missing=missing))

    def _count(
        self, group: Group, state: Callable[[], State], leaving: Collection[int] = ()
    ) -> Iterator[Event]:
        """Have more workers, or fewer again: first of all without those that are `leaving`."""
        workers = len(state().wanted - state().servers)
        workers += -group.workers if group.counted else group.workers
        if refuse_scale(state(), self._job, workers):
            group.workers = 0  # then nor do any leave
        else:
            yield Scaled(workers, tuple(group.numbers), frozenset(leaving))
        group.counted = not group.counted
        self._save()

    def leave(self, client: int, now: float, why: str) -> None:
        """The hosts of a client are about to go: nothing more starts there."""
        for group in self._groups:
            if group.client == client and not group.leaving:
                group.leaving, self._since[client] = True, now
                self._hosts.numbers.retire(group.numbers)
                self._emit("hosts_leaving", {"hosts": group.numbers, "why": why})
                self._save()

    def _clear(
        self, group: Group, state: Callable[[], State], placed: Mapping[int, int], now: float
    ) -> Iterator[Event]:
        """Have the workers leave; then the hosts may go."""
        here = {worker for worker, host in placed.items() if host in group.numbers}
        if group.counted:
            yield from self._count(group, state, here)
        yield from map(Noticed, sorted(here))
        late = now - self._since[group.client] > LEAVE_S
        if late or (not here and self._starts.hosts.isdisjoint(group.numbers)):
            yield from self._remove(group)

    def _remove(self, group: Group) -> Iterator[Event]:
        group.left = True
        self._save()
        text = "the run goes on without this host."
        for peer in self._hosts.remove(group.numbers):
            self._send(peer, m.Refused(kind="Unwanted", text=text, exit_code=0))
        if group.client in self._peers:
            self._send(self._peers[group.client], m.Leave())
        yield HostJoined()  # another host starts what these were to start
