"""A worker's membership in its run: messages to and from the master.

Step records are collected and sent a few times a second, so that the master has no work in each
step; looking for messages costs a step a microsecond. Models and training are not known here.
"""

from __future__ import annotations

import os
import platform
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from instep.comm.protocol.channel_store import ChannelStore
from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import (
    KNOWN,
    PREDICTOR,
    AnyMessage,
    Broken,
    Built,
    Done,
    Emit,
    Failed,
    Form,
    Formed,
    Heartbeat,
    Hello,
    Mark,
    Notice,
    Refused,
    Regroup,
    Release,
    Stop,
    StoreSet,
    StoreValue,
    Verdict,
    Welcome,
    keys_of_generation,
    keys_of_replica,
)
from instep.engine.membership import (
    GenerationLease,
    PredictionTurns,
    RecordSender,
    Released,
    RunStore,
    StopDecisions,
)
from instep.errors import PeerError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.store.folder import id_of
from instep.system import causes
from instep.system.addresses import address_towards
from instep.system.environment import places_here, recipe_here
from instep.system.forks import Fork
from instep.system.limits import FLOOR_S
from instep.system.memory_files import given
from instep.system.outbox import ROOM, Outbox
from instep.system.processes import FORWARDER, is_stopped, machine
from instep.words import plural

if TYPE_CHECKING:
    from instep.comm.encryption.forwarder import Forwarder

LAST_WORD_S = 20.0
"""How long a worker that has failed waits for a master to report to: one that hangs is replaced in
less."""


KILL_S = 2.0
"""How long a worker whose replica came apart waits for the master to kill it."""


class ReplicaBroken(Exception):
    """The group inside this worker's replica came apart, which lives as long as its processes."""


def _welcomed(endpoint: Endpoint, number: int, *, forked: bool) -> tuple[MasterConnection, Welcome]:
    """Connect to the master, as a worker that it accepts."""
    hello = Hello(
        token=endpoint.token,
        role="worker",
        number=number,
        pid=os.getpid(),
        host=endpoint.host,
        machine=machine(),
        node=platform.node(),
    )
    connection = MasterConnection(endpoint.address, hello, endpoint.context)
    connection.lasting = forked  # another master may answer
    welcome = connection.welcome()
    if isinstance(welcome, Refused):
        connection.close()
        raise causes.as_error(welcome)
    return connection, welcome


def _forwarder(endpoint: Endpoint, number: int, address: str, *, forked: bool) -> Forwarder | None:
    if endpoint.credentials is None:
        return None
    from instep.comm.encryption.forwarder import Forwarder

    alone = forked and threading.active_count() == 1
    fork = partial(Fork, name=FORWARDER) if alone else None
    return Forwarder(number, address, endpoint.credentials, machine(), fork=fork)


def _job_here(text: str) -> JobSpec:
    """The job of the master, with paths as they are on this host."""
    job = spec_file.build(tomllib.loads(text), source="the master")
    return msgspec.structs.replace(
        job,
        recipe=recipe_here(job.recipe),
        python_path=places_here(job.recipe, job.python_path),
    )


class Member:
    """One worker's membership in a run.

    Args:
        endpoint: where the master is.
        number: this worker's, for as long as it lives.
        phases: seconds that parts of the start took, so far.

    Raises:
        PeerError: no master answers there.
        InstepError: the run cannot be started or resumed; process 0 says why.
    """

    def __init__(
        self, endpoint: Endpoint, number: int, phases: Mapping[str, float] | None = None
    ) -> None:
        self.number, self.token = number, endpoint.token
        self.address = self.outside = address_towards(endpoint.address.host)
        """The local address on which groups listen."""
        self.credentials = endpoint.credentials
        """What this process shows on connections of its own, to `outside`; None where these are not
        encrypted."""
        self._connection, welcome = _welcomed(endpoint, number, forked=phases is not None)
        self.forwarder = _forwarder(endpoint, number, self.address, forked=phases is not None)
        """Encrypts what this worker sends to others; None if nothing does."""
        if self.forwarder is not None:
            self.address = self.forwarder.inside
        self.job = _job_here(welcome.job)
        self.run = Path(welcome.run)
        """Its folder; only processes that see it touch it."""
        self.sees_run = not welcome.run_id or id_of(self.run) == welcome.run_id
        """Whether that folder is here, and not only on the machine of the master."""
        self.scratch = self.run if self.sees_run else Path(tempfile.gettempdir())
        """A folder here for files that are gone when they are closed."""
        self.last_step = welcome.last_step
        """Of a run that is complete."""
        self.started, self.role = welcome.started, welcome.role
        self.checkpoint = Path(welcome.checkpoint) if welcome.checkpoint else None
        self.phases = dict(phases or {})
        self.recovers, self.complete = welcome.recovers, welcome.complete
        self.together = False
        """Whether the group ends with any of its members."""
        self.holds = False
        """Whether this process holds the state of the run before its first generation."""
        self.others_have_state = welcome.others_have_state
        """Whether other workers have the state of the run."""
        self.restarts = welcome.restarts
        """How often the replica of this worker was started again."""
        self.known = welcome.known
        """What `remember` of an earlier process was given; empty if there was none."""
        self._connection.lasting = not welcome.complete  # a lost master will be replaced
        if self._connection.lasting and self.role != PREDICTOR and given() >= 0:
            self._keep_messages(Outbox(given()))
        self.marks: Sequence[Mark] = welcome.marks
        """Samples at which processes have ended; the same for all members of a generation."""
        self.form: Form | None = None
        self.phase = "recipe"
        """What this worker is doing while it gets ready."""
        self.at: Callable[[], Heartbeat] | None = None
        """What this worker is doing while it trains; called for each heartbeat."""
        self.interrupt: Callable[[], None] = lambda: None
        """Aborts the present exchange; called by another thread."""
        self.hold: Callable[[], None] = lambda: None
        """Stops all writing for the present generation; called by another thread."""
        self._next: Form | None = None
        self._regroup = -1  # the generation that is to be left at the next commit
        self._leaving = False
        self.lease = GenerationLease(self._connection)
        self.stops = StopDecisions(self._connection, self._listen)
        self.run_store = RunStore(self._connection, number)
        self.predictions = PredictionTurns(self._connection)
        self.records = RecordSender(self._connection, number)
        self._forwarder_ran_at = time.monotonic()

    def _keep_messages(self, outbox: Outbox) -> None:
        """Keep messages where the next process finds them; it sends those of the last one."""
        self._connection.keep_in(outbox)
        if outbox.lost:
            self.warn(
                f"{plural(outbox.lost, 'message')} of worker {self.number} to the log of the run "
                "(what was logged, and records of its steps) were lost with its last process: "
                f"more than {ROOM >> 20} MiB of them waited for a master. No step was lost."
            )

    def show_itself(self) -> None:
        """Send heartbeats from now on, though this worker is not ready yet.

        Their thread exists while loader processes are forked; it holds no lock that they use.
        """
        if not self.complete:
            self._connection.listen(self._heartbeat, self._arrived, self._lapsed)

    def _heartbeat(self) -> Heartbeat:
        self._end_stopped_forwarder()
        return self.at() if self.at is not None else Heartbeat(phase=self.phase)

    def _end_stopped_forwarder(self) -> None:
        """In the listening thread: end it, for another to be started with the next group."""
        now, forwarder = time.monotonic(), self.forwarder
        if forwarder is None or not is_stopped(forwarder.pid):
            self._forwarder_ran_at = now
        elif now - self._forwarder_ran_at > FLOOR_S:
            forwarder.kill()

    def wait_for_group(self) -> Form:
        """Wait for the next generation, and return its members.

        Raises:
            Released: this worker is in no further generation.
        """
        if self.form is None:
            built = Built(recovers=self.recovers, together=self.together, holds=self.holds)
            self._connection.send(built)
            if self.at is not None:
                if self.recovers and self.job.launch.count:
                    self._connection.keep()
                if not self._connection.inbox.thread:
                    self.show_itself()
        present = self.form.generation if self.form else -1
        while not self._next or self._next.generation <= present:
            answer = self._connection.inbox.wait_for(Form, Release)
            if isinstance(answer, Release):
                raise Released
            self._next = answer
        self._connection.wait_for_lease()
        self.lease.begin(self._next.generation)
        self.form, self._next = self._next, None
        self.marks = self.form.marks
        return self.form

    def _arrived(self, message: AnyMessage) -> None:
        """In the listening thread: abort an exchange that cannot end any more."""
        if not isinstance(message, Form):
            return
        # before this thread connects to another master, which would send the form again
        self._connection.hello = msgspec.structs.replace(
            self._connection.hello, generation=message.generation
        )
        if self.form is not None and message.generation > self.form.generation:
            self.interrupt()

    def _lapsed(self) -> None:
        """In the listening thread: the lease is over, and the others may continue without us."""
        self.lease.fence()
        self.hold()
        self.interrupt()

    def waits_for_writer(self) -> bool:
        """Whether to wait for another process that still has the ledger locked.

        Raises:
            PeerError: the present generation is over.
        """
        if self.superseded:
            raise PeerError("the members have changed while the ledger was in use.")
        return self.job.launch.count > 0

    def leave_soon(self) -> None:
        """This worker's machine will be taken away; may be called from a signal handler."""
        self._leaving = True

    @property
    def superseded(self) -> bool:
        """Whether another generation begins, so that the present one can commit nothing more."""
        self._listen()
        return self._next is not None or self.lease.fenced

    @property
    def regroups(self) -> bool:
        """Whether the master wants this generation to end with the step under way."""
        self._listen()
        return self.form is not None and self._regroup == self.form.generation

    def formed(self) -> None:
        """Report that this worker is in the group, and has the state of the run."""
        assert self.form is not None, "no generation yet"
        self._connection.send(Formed(generation=self.form.generation))

    def broken(self, error: PeerError | None = None, *, holds: bool = False) -> None:
        """Report that this worker has left the group, and waits for the next.

        Args:
            error: why the group came apart; None if only its members change.
            holds: whether this worker holds the state of the run.
        """
        assert self.form is not None, "no generation yet"
        self.records.flush()
        cause, mine = (str(error), error.mine) if error is not None else ("", False)
        generation = self.form.generation
        self._connection.send(Broken(generation=generation, cause=cause, mine=mine, holds=holds))

    def store(self, group: str = "") -> ChannelStore:
        """The store by which the members of the present generation connect, or a group of them."""
        assert self.form is not None, "no generation yet"
        keys = keys_of_generation(self.form.generation)
        if self.forwarder is not None:
            self.forwarder.begin(keys)
        return ChannelStore(self._connection, keys + group, forwarder=self.forwarder)

    def replica_store(self, group: str = "") -> ChannelStore:
        """The store by which the processes of this worker's replica connect, or make a group of
        their own, before the first generation. None of an earlier start of it is met there.

        Set `phase` to `meeting` around it: a worker in that phase waits, and does not hang. A wait
        in the store raises Released once the run does not need this worker, and PeerError if there
        is no master any more.
        """
        replica = self.job.mesh.coordinate(self.number).replica
        return ChannelStore(
            self._connection,
            keys_of_replica(replica, self.restarts) + group,
            released=Released,
            forwarder=self.forwarder,
        )

    def remember(self, what: bytes) -> None:
        """Have it known to processes that are started from now on."""
        self.known = what
        self._connection.send(StoreSet(key=KNOWN, value=what))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase in this context, before there is a group."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def wait_to_be_killed(self, timeout_s: float = KILL_S) -> NoReturn:
        """The group inside this worker's replica came apart: usually another process was lost.

        Then the master kills this one as well, and starts the replica again. If it does not, or if
        it tells this worker to form another group, this process has to end by itself.

        Raises:
            ReplicaBroken: end now, with the exit code of PeerError and no last message.
            Released: the run does not need this worker.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._next is None:
            message = self._connection.inbox.poll()
            if isinstance(message, Release):
                raise Released
            if isinstance(message, Form):
                break
            if message is None:
                time.sleep(0.01)
        raise ReplicaBroken

    def _listen(self) -> None:
        if self._leaving:
            self._leaving = False
            self._connection.send(Notice())
        while (message := self._connection.inbox.poll()) is not None:
            match message:
                case Stop() | Verdict():
                    self.stops.take(message)
                case Form():
                    self._next = message
                case Regroup(generation=generation):
                    self._regroup = generation
                case StoreValue():
                    pass  # of a group that did not form
                case _:
                    self._connection.inbox.put_back(message)
                    return

    def emit(self, name: str, **fields: Any) -> None:
        """Send an event for the run's log, after everything recorded before it."""
        self.records.flush()
        self._connection.send(Emit(name=name, fields=fields))

    def warn(self, text: str) -> None:
        """Send a warning for the run's log at once, from any thread."""
        self._connection.send(Emit(name="warning", fields={"text": text}))

    def failed(self, word: Failed) -> None:
        """Send the last message of a failed worker; if the master is lost, wait for the next.

        Raises:
            PeerError: the run is over; the text says why, if a master has said so.
        """
        self.records.flush()
        self._connection.send(word)
        self._connection.wait_until_acknowledged(LAST_WORD_S)
        if self._connection.refusal is not None:
            raise self._connection.refusal

    def done(
        self,
        step: int,
        rule: str,
        *,
        finite: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> bool:
        """Report the end of training, and wait for the others, who may still read from us.

        Args:
            step: the last one.
            rule: why it was the last.
            finite: whether its loss was finite.
            meanwhile: called again and again while it waits; it takes a moment.

        Returns:
            False if another generation begins instead: a member was lost before the end.
        """
        self.records.flush()
        self.records.meter()
        generation = self.form.generation if self.form else 0
        self._connection.send(Done(generation=generation, step=step, rule=rule, finite=finite))
        while self._next is None:
            if meanwhile is None:
                answer = self._connection.inbox.wait_for(Release, Form)
            elif (answer := self._connection.inbox.poll(Release, Form)) is None:
                meanwhile()
                continue
            if isinstance(answer, Release):
                return True
            self._next = answer
        return False

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        if self.forwarder is not None:
            self.forwarder.close()
