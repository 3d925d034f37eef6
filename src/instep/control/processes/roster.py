"""The processes of a run as the master knows them: a record for each connection and each worker.

What a process may do, and what follows from its end, is not known here. Way in: `Roster`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Hub, Peer
from instep.control.hosts.hosts import Hosts, LocalProcess, Process, RemoteProcess
from instep.control.hosts.joined_hosts import JoinedHosts
from instep.control.hosts.worker_starts import WorkerStarts
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S
from instep.system.processes import machine


@dataclass
class Connection:
    """A process that has introduced itself on this connection."""

    role: str
    number: int
    resends: int
    """How many of its next messages a lost master may have handled."""
    handled: int = 0
    heartbeat: int = 0
    """The number of the newest."""
    lease: Lease | None = None
    """A host's, if it is on this machine."""

    def expect(self, lease: Lease) -> None:
        """Expect signs of life."""
        self.lease = lease

    def beats(self, heartbeat: m.Heartbeat, now: float) -> None:
        """A heartbeat has come."""
        self.heartbeat = heartbeat.number
        if self.lease is not None:
            self.lease.renew(now)

    def count(self) -> None:
        """Count a message that has taken effect."""
        self.handled += 1
        self.resends = max(0, self.resends - 1)


@dataclass
class WorkerRecord:
    """The process under one number, as far as it is known."""

    hello: m.Hello | None = None
    """The `Hello` of the last process, also once it ended."""
    peer: Peer | None = None
    process: Process | None = None
    """Under `instep.join`: of this machine only."""
    last_message: float | None = None
    """When it connected, or sent its last heartbeat."""
    heartbeat: m.Heartbeat | None = None
    """The last on its present connection."""
    seen_ended: float | None = None
    """When it was first seen that it has ended."""

    def beats(self, heartbeat: m.Heartbeat, now: float) -> None:
        """A heartbeat has come."""
        self.last_message, self.heartbeat = now, heartbeat

    def silent_since(self, now: float) -> float:
        """When its last message came; from now on, if none ever did."""
        self.last_message = now if self.last_message is None else self.last_message
        return self.last_message

    def ended_since(self, now: float) -> float:
        """When it was first seen that it has ended, which it has."""
        self.seen_ended = now if self.seen_ended is None else self.seen_ended
        return self.seen_ended

    def is_process(self, pid: int, *, far: bool) -> bool:
        """Whether its process is this one."""
        known = self.process
        return known is not None and known.pid == pid and isinstance(known, RemoteProcess) == far

    @property
    def machine(self) -> str:
        """The machine of its last process; empty if that is not known."""
        return self.hello.machine if self.hello is not None else ""

    @property
    def is_abandoned(self) -> bool:
        """Whether it is a process of another machine that is being killed: it gets no answers."""
        return isinstance(self.process, RemoteProcess) and self.process.killed_at is not None

    def is_reached(self, now: float) -> bool:
        """Whether it is connected, and gave a sign of life lately."""
        return (
            self.peer is not None
            and self.last_message is not None
            and now - self.last_message < FLOOR_S
        )

    @property
    def is_stopped(self) -> bool:
        """Whether the system knows that its process does not run."""
        return self.process is not None and self.process.stopped


class Roster:
    """The processes of one run.

    Args:
        hub: has their connections.
        hosts: through which those of other machines are reached.
        starts: of workers, on hosts.
        joined_hosts: those of them that came while the run was running.
    """

    def __init__(
        self, hub: Hub, hosts: Hosts, starts: WorkerStarts, joined_hosts: JoinedHosts
    ) -> None:
        self.hub, self.hosts, self.starts, self.joined_hosts = hub, hosts, starts, joined_hosts
        self._machine = machine()
        self.connections: dict[Peer, Connection] = {}
        self.away: dict[int, float] = {}
        """Workers that live without a connection, and since when."""
        self._workers: dict[int, WorkerRecord] = {}
        self.gone: set[tuple[int, int]] = set()
        """Host and pid of workers that have ended."""
        self.unusable = Counter[tuple[str, int]]()
        """Messages that could not be used, by role and number."""

    # ---- connections

    @property
    def client(self) -> Peer | None:
        """The process that submitted the job, if it is connected."""
        each = (p for p, c in self.connections.items() if (c.role, c.number) == ("client", 0))
        return next(each, None)

    def drop(self, peer: Peer) -> Connection | None:
        """Close a connection; its record, if there was one."""
        self.hub.drop(peer)
        return self.connections.pop(peer, None)

    # ---- workers

    def worker(self, number: int) -> WorkerRecord:
        """The record of a worker's number."""
        return self._workers.setdefault(number, WorkerRecord())

    def processes(self) -> dict[int, Process]:
        """Processes by the workers' numbers, in the order in which they came."""
        return {n: each.process for n, each in self._workers.items() if each.process is not None}

    def placed(self) -> dict[int, int]:
        """Hosts by the numbers of the workers there."""
        return {n: process.host for n, process in self.processes().items()}

    def watch(self, number: int, pid: int, host: int = 0, *, far: bool | None = None) -> None:
        """Watch a process under this number, and no other; `far` if on another machine."""
        self._workers[number] = record = self._workers.pop(number, WorkerRecord())  # the newest
        if record.process is not None:
            record.process.close()
        far = self.hosts.several if far is None else far  # not known until it connects
        record.process = RemoteProcess(self.hosts, host, pid) if far else LocalProcess(host, pid)

    def is_here(self, hello: m.Hello) -> bool:
        """Whether a process is on this machine."""
        return hello.machine == self._machine

    def is_remote(self, hello: m.Hello) -> bool:
        """Whether a process is on another machine, as far as signals and its end are concerned."""
        return self.hosts.several and not self.is_here(hello)

    def connect(self, peer: Peer, hello: m.Hello, now: float) -> None:
        """A worker's process has connected."""
        worker = self.worker(hello.number)
        worker.peer, worker.last_message, worker.heartbeat = peer, now, None
        self.away.pop(hello.number, None)

    def introduce(self, hello: m.Hello) -> m.Hello:
        """Note who a worker is; returns the `Hello` of the process before."""
        worker = self.worker(hello.number)
        before, worker.hello = worker.hello or hello, hello
        return before

    def disconnect(self, number: int) -> Peer | None:
        """A worker has no connection; the one that it had."""
        worker = self.worker(number)
        before, worker.peer = worker.peer, None
        return before

    def forget_process(self, number: int) -> Process | None:
        """Watch a worker's process no longer."""
        worker = self.worker(number)
        before, worker.process = worker.process, None
        return before

    def forget(self, number: int) -> None:
        """A worker's process has ended: only its `Hello` is kept."""
        worker = self.worker(number)
        worker.last_message = worker.heartbeat = worker.seen_ended = None
        self.away.pop(number, None)
        del self.unusable["worker", number]

    def close(self) -> None:
        """Let go of all processes."""
        for process in self.processes().values():
            process.close()
