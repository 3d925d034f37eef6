"""Who may come in: a process shows the run's token and its certificate, and is welcomed or refused.

What a process says later is not read here (`inbox.py`). Way in: `Reception`.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from instep.comm.protocol import messages as m
from instep.comm.protocol.hub import Peer
from instep.control.decisions import crash_loop
from instep.control.decisions.events import HostJoined, Joined, Reconnected
from instep.control.decisions.phases import Phase
from instep.control.decisions.state import State
from instep.control.keys import Keys
from instep.control.processes.observations import Observations
from instep.control.processes.roster import Connection, Roster
from instep.control.recorder import Recorder
from instep.control.watch import Watch
from instep.errors import PeerError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.system.lease import Lease
from instep.system.processes import has_ended

_ROLES = ("worker", "host", "client")

_OTHER_VERSION = (
    "{role} {number} has another version of instep than the run. Install the same one on all "
    "machines."
)


@dataclass(frozen=True, kw_only=True)
class Reception:
    """Answers each `Hello`."""

    job: JobSpec
    run: Path
    run_id: str
    """By which a process knows whether it sees the folder; empty if all do."""
    token: str
    """Shown by each process that may come in."""
    started: float
    """Unix seconds at which the user's command began."""
    hosted: bool
    """Whether a host starts the workers."""
    roster: Roster
    recorder: Recorder
    watch: Watch
    keys: Keys
    state: Callable[[], State]
    """Tells the state of the run."""

    def welcome(self, peer: Peer, hello: m.Hello, now: float) -> Observations:
        """Answer a process that introduces itself."""
        known = hmac.compare_digest(hello.token.encode(), self.token.encode())
        known &= self._has_shown(peer, hello)
        if not known or hello.role not in _ROLES:
            self.roster.hub.drop(peer)
            return
        if hello.version != m.VERSION:
            text = _OTHER_VERSION.format(role=hello.role, number=hello.number)
            self._refuse(peer, "SpecError", text, SpecError.exit_code)
            return
        self.roster.hub.trust(peer)
        if not self._may_come(peer, hello):
            text = "the run has replaced this process: another has its place."
            self._refuse(peer, "Unwanted", text, PeerError.exit_code)
            return
        connection = Connection(hello.role, hello.number, hello.resends)
        self.roster.connections[peer] = connection
        if hello.role == "worker":
            # first: who knows of a start of its replica is known to be of it
            yield from self._welcome_worker(peer, hello, now)
        self.roster.hub.send(peer, self._welcome(hello))
        if hello.role == "host":
            yield from self._welcome_host(peer, hello, connection, now)
        if hello.role == "client" and self.roster.joined_hosts.is_client(hello.number):
            self.roster.joined_hosts.heartbeat(hello.number, peer, now)

    def _welcome(self, hello: m.Hello) -> m.Welcome:
        state = self.state()
        return m.Welcome(
            job=spec_file.dump(self.job),
            run=str(self.run),
            run_id=self.run_id,
            started=self.started,
            checkpoint=state.checkpoint,
            recovers=state.recovers,
            marks=crash_loop.marks(state),
            others_have_state=bool(state.holders),
            role=state.member(hello.number).role,
            restarts=state.restarts_of(hello.number),
            known=self.keys.value(m.KNOWN),
        )

    def _refuse(self, peer: Peer, kind: str, text: str, code: int) -> None:
        self.roster.hub.send(peer, m.Refused(kind=kind, text=text, exit_code=code))
        self.roster.hub.drop(peer)

    def _has_shown(self, peer: Peer, hello: m.Hello) -> bool:
        """Whether a process is what its certificate says, where there are certificates."""
        worker = hello.role == "worker"
        role = self.state().member(hello.number).role if worker else hello.role
        return peer.shown in (None, (role, hello.number, hello.host))

    def _welcome_host(
        self, peer: Peer, hello: m.Hello, connection: Connection, now: float
    ) -> Observations:
        number, worker = hello.number, self.roster.worker
        self.recorder.emit("host_joined", {"pid": hello.pid, "host": number})
        before = self.roster.hosts.joins(peer, number, hello.pid, now, hello.machine)
        if before is not None:
            self.roster.drop(before)
        if self.roster.is_here(hello):  # its first imports may take long
            connection.expect(Lease(hello.pid, now, first_s=math.inf))
        own = [(n, p.pid) for n, p in self.roster.processes().items() if p.host == number]
        there = [(n, pid) for n, pid in own if worker(n).peer is not None]
        # on another machine these numbers are those of other programs
        if there := [each for each in there if worker(each[0]).machine == hello.machine]:
            self.roster.hub.send(peer, m.Adopt(workers=there))
        self.roster.starts.has_become_ready(now)  # which is what follows
        yield HostJoined()

    def _welcome_worker(self, peer: Peer, hello: m.Hello, now: float) -> Observations:
        number, state = hello.number, self.state()
        self.roster.connect(peer, hello, now)
        self.roster.starts.started(number, hello.host)
        far, record = self.roster.is_remote(hello), self.roster.worker(number)
        if self.hosted:
            is_new = not record.is_process(hello.pid, far=far)
        else:
            is_new = self.roster.is_here(hello) and record.process is None
        if is_new:
            self.roster.watch(number, hello.pid, hello.host, far=far)
        before = self.roster.introduce(hello).host
        self.watch.begins(number, now, ready=number in state.ready)
        if number in state.joined:
            yield Reconnected(number, hello.generation or 0)
            return
        role = state.member(number).role
        fields = {"worker": number, "role": role, "pid": hello.pid, "host": hello.host}
        self.recorder.emit("worker_joined", {**fields, "seconds": time.time() - self.started})
        if before != hello.host:
            self.recorder.moved(number, before, hello.host)
        yield Joined(number)

    def _may_come(self, peer: Peer, hello: m.Hello) -> bool:
        """Whether the run needs a process: one for each worker's number, once."""
        if peer in self.roster.connections:
            return False
        if hello.role == "client":
            return hello.number < 2 or self.roster.joined_hosts.is_client(hello.number)
        if hello.role == "host":
            replaced = self.roster.hosts.was_replaced(hello.number, hello.machine, hello.pid)
            return not (replaced or self.roster.hosts.numbers.has_left(hello.number))
        number, state, record = hello.number, self.state(), self.roster.worker(hello.number)
        if self.roster.hosts.is_abandoned(hello.host, hello.pid) or record.is_abandoned:
            return False
        if state.member(number).phase is Phase.ENDED:  # it was refused, and has not read it yet
            return False
        if number in state.joined:  # the same process, whose connection or master was lost
            return self._is_same(hello)
        if hello.generation is not None:  # the run has continued without it
            return False
        # it may have ended before the master read its `Hello`
        ended = self.hosted and not self.roster.is_remote(hello) and has_ended(hello.pid)
        return number in state.needed and record.peer is None and not ended

    def _is_same(self, hello: m.Hello) -> bool:
        """Whether a worker has joined before; then its former connection is closed."""
        record = self.roster.worker(hello.number)
        same = record.hello is not None and record.hello.pid == hello.pid
        if self.hosted:
            same &= record.process is not None and record.process.host == hello.host
        if same and (before := self.roster.disconnect(hello.number)) is not None:
            self.roster.drop(before)
        return same
