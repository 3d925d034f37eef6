"""A worker's connection to its run: what it hears from the master, and what it tells.

Step records are gathered and sent a few times a second, so that a step costs
the master nothing; listening costs a step a microsecond. It knows nothing of
models or training.
"""

from __future__ import annotations

import os
import platform
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instep import spec_file
from instep.comm.channel_store import ChannelStore
from instep.comm.connection import MasterConnection
from instep.comm.endpoint import Endpoint
from instep.comm.messages import (
    AnyMessage,
    Broken,
    Built,
    Done,
    Emit,
    Failed,
    Figures,
    Form,
    Formed,
    Heartbeat,
    Hello,
    Mark,
    Notice,
    Records,
    Refused,
    Regroup,
    Release,
    Stop,
    StoreValue,
    Verdict,
)
from instep.comm.metered import tcp_traffic
from instep.errors import PeerError
from instep.events import STEPS
from instep.system import causes
from instep.system.processes import machine

FLUSH_S = 0.25
"""How often records leave for the master."""

TRAFFIC_S = 1.0
"""How often the kernel is asked for the bytes sent and received."""

LAST_WORD_S = 20.0
"""How long a worker that cannot go on waits for a master that hears why: one that was stopped is
replaced in less."""


class Released(Exception):
    """The run has no more use for this worker; no error."""


class Member:
    """One worker's membership in a run.

    Args:
        endpoint: where the master is.
        number: this worker's, for as long as it lives.
        phases: seconds that parts of the start took, so far.

    Raises:
        PeerError: no master answers there.
        InstepError: the run cannot begin or go on, as process 0 found out.
    """

    def __init__(
        self, endpoint: Endpoint, number: int, phases: Mapping[str, float] | None = None
    ) -> None:
        self.number = number
        self.master_host = endpoint.address.host
        hello = Hello(
            token=endpoint.token,
            role="worker",
            number=number,
            pid=os.getpid(),
            host=endpoint.host,
            machine=machine(),
            node=platform.node(),
        )
        self._connection = MasterConnection(endpoint.address, hello)
        self._connection.lasting = phases is not None  # forked: another master may answer
        welcome = self._connection.welcome()
        if isinstance(welcome, Refused):
            self._connection.close()
            raise causes.as_error(welcome)
        self.job = spec_file.build(tomllib.loads(welcome.job), source="the master")
        self.run = Path(welcome.run)
        self.started, self.role = welcome.started, welcome.role
        self.checkpoint = Path(welcome.checkpoint) if welcome.checkpoint else None
        self.phases = dict(phases or {})
        self.recovers, self.complete = welcome.recovers, welcome.complete
        self.goes_on = welcome.goes_on
        """Whether other workers hold the state of the run."""
        self._connection.lasting = not welcome.complete  # the master is lost, and another answers
        self.marks: Sequence[Mark] = welcome.marks
        """Samples at which processes have ended; the same for all members of a generation."""
        self.form: Form | None = None
        self.phase = "recipe"
        """What this worker is at while it gets ready."""
        self.at: Callable[[], Heartbeat] | None = None
        """What this worker is doing; told to the master while it trains."""
        self.interrupt: Callable[[], None] = lambda: None
        """Breaks the exchange under way, from another thread."""
        self.hold: Callable[[], None] = lambda: None
        """Has this worker write nothing more of the present generation, from another thread."""
        self._fenced = -1  # the generation in which nothing more may be committed
        self._next: Form | None = None
        self._stop: Stop | None = None
        self._regroup = -1  # the generation that is to be left at the next commit
        self._leaving = False
        self._verdicts: deque[Verdict] = deque()
        self._asked = self._answered = 0
        self._ledger = bytearray()
        self._steps: list[tuple[Any, ...]] = []
        self._flushed = self._metered = time.monotonic()

    def show_itself(self) -> None:
        """Tell the master from now on that this process lives, though it is not ready yet.

        The thread that does so exists while loader processes are forked: it has no lock
        that they use.
        """
        if not self.complete:
            self._connection.listen(self._heartbeat, self._arrived, self._lapsed)

    def _heartbeat(self) -> Heartbeat:
        return self.at() if self.at is not None else Heartbeat(phase=self.phase)

    def wait_for_group(self) -> Form:
        """The members of the next generation, once all have come.

        Raises:
            Released: there will be none with this worker in it.
        """
        if self.form is None:
            self._connection.send(Built(recovers=self.recovers))
            if self.at is not None:
                if self.recovers and self.job.launch.hosts:
                    self._connection.keep()
                if not self._connection.listens:
                    self.show_itself()
        present = self.form.generation if self.form else -1
        while not self._next or self._next.generation <= present:
            answer = self._connection.wait_for(Form, Release)
            if isinstance(answer, Release):
                raise Released
            self._next = answer
        self._connection.wait_for_lease()
        self.form, self._next = self._next, None
        self.marks = self.form.marks
        return self.form

    def _arrived(self, message: AnyMessage) -> None:
        """In the listening thread: break an exchange that will not end by itself."""
        if not isinstance(message, Form):
            return
        # before this thread connects to another master, which would send the form again
        self._connection.hello = msgspec.structs.replace(
            self._connection.hello, generation=message.generation
        )
        if self.form is not None and message.generation > self.form.generation:
            self.interrupt()

    def _lapsed(self) -> None:
        """In the listening thread: the others may go on without this worker by now."""
        self.fence()
        self.hold()
        self.interrupt()

    def fence(self) -> None:
        """Have nothing more committed in the present generation."""
        if self.form is not None:
            self._fenced = self.form.generation

    @property
    def fenced(self) -> bool:
        """Whether nothing more may be committed in the present generation.

        So it is between hosts once the master has not been heard from for a lease,
        and stays so until the next generation.
        """
        if self._connection.lapsed:
            self.fence()
        return self.form is not None and self._fenced == self.form.generation

    def check_lease(self) -> None:
        """PeerError where nothing more may be committed in the present generation."""
        if self.fenced:
            raise PeerError("the master was not heard from for too long: the others may go on.")

    def waits_for_writer(self) -> bool:
        """Whether a process that still has the ledger is waited for.

        Raises:
            PeerError: this worker cannot get it in the present generation any more.
        """
        if self.superseded:
            raise PeerError("the members have changed while the ledger was in use.")
        return bool(self.job.launch.hosts)

    def leave_soon(self) -> None:
        """This worker's machine is about to go away; may be called from a signal handler."""
        self._leaving = True

    @property
    def superseded(self) -> bool:
        """Whether another generation is to begin, so that the present one can end nothing more."""
        self._listen()
        return self._next is not None or self.fenced

    @property
    def regroups(self) -> bool:
        """Whether the master wants this generation to end with the step under way."""
        self._listen()
        return self.form is not None and self._regroup == self.form.generation

    def formed(self) -> None:
        """Tell that this worker is in the group, and holds the state of the run."""
        assert self.form is not None, "no generation yet"
        self._connection.send(Formed(generation=self.form.generation))

    def broken(self, error: PeerError | None = None, *, holds: bool = False) -> None:
        """Tell that this worker has left the group, and waits for the next.

        Args:
            error: why it came apart; None where its members were to change.
            holds: whether this worker holds the state of the run.
        """
        assert self.form is not None, "no generation yet"
        self.flush()
        cause, mine = (str(error), error.mine) if error is not None else ("", False)
        generation = self.form.generation
        self._connection.send(Broken(generation=generation, cause=cause, mine=mine, holds=holds))

    def store(self) -> ChannelStore:
        """The meeting place of the present generation."""
        assert self.form is not None, "no generation yet"
        return ChannelStore(self._connection, f"generation-{self.form.generation}/")

    def stop_rule(self, step: int) -> str | None:
        """Why the master wants to stop with this step, if it does; listens without waiting."""
        self._listen()
        stop = self._stop
        return stop.rule if stop and (stop.after is None or step > stop.after) else None

    def forget_stop(self, step: int) -> None:
        """This worker went back to a step: a later one's figures may have caused the stop.

        The master says it again to the next generation, if it still wants it.
        """
        if self._stop is not None and self._stop.after is not None and self._stop.after >= step:
            self._stop = None

    def _listen(self) -> None:
        if self._leaving:
            self._leaving = False
            self._connection.send(Notice())
        while (message := self._connection.poll()) is not None:
            match message:
                case Stop():
                    self._stop = message
                case Verdict():
                    self._verdicts.append(message)
                case Form():
                    self._next = message
                case Regroup(generation=generation):
                    self._regroup = generation
                case StoreValue():
                    pass  # of a group that did not form
                case _:
                    self._connection.put_back(message)
                    return

    def tell(self, figures: Figures) -> None:
        """Figures for the master to judge; `verdict` gives the answer."""
        self._asked += 1
        self._connection.send(msgspec.structs.replace(figures, number=self._asked))

    def verdict(self) -> Verdict:
        """The answer to the oldest figures that have had none; waits for it."""
        while True:
            waiting = self._verdicts
            answer = waiting.popleft() if waiting else self._connection.wait_for(Verdict)
            if answer.number > self._answered:  # else two masters have answered
                self._answered = answer.number
                return answer

    def emit(self, name: str, **fields: Any) -> None:
        """An event for the run's log, after whatever was recorded before it."""
        self.flush()
        self._connection.send(Emit(name=name, fields=fields))

    def record(self, ledger: bytes, steps: tuple[Any, ...]) -> None:
        """One committed step, for whoever watches.

        Args:
            ledger: its records, from the worker that has written them; else empty.
            steps: how long it took, values in the order of `STEPS`'s fields.
        """
        self._ledger += ledger
        self._steps.append(steps)
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what has been recorded, and now and then the traffic."""
        now = time.monotonic()
        self._flushed = now
        if self._steps:
            ledger, steps = bytes(self._ledger), np.array(self._steps, STEPS).tobytes()
            self._ledger.clear()
            self._steps.clear()
            self._connection.send(Records(ledger=ledger, steps=steps))
        if now - self._metered > TRAFFIC_S:
            self.meter()

    def meter(self) -> None:
        """Tell how much has gone over the network so far."""
        self._metered = time.monotonic()
        fields = {"worker": self.number, **tcp_traffic()._asdict()}
        self._connection.send(Emit(name="traffic", fields=fields))

    def failed(self, word: Failed) -> None:
        """The last word of a worker that cannot go on; a master that is lost is waited for."""
        self.flush()
        self._connection.send(word)
        self._connection.wait_until_acknowledged(LAST_WORD_S)

    def done(self, step: int, rule: str, *, finite: bool = True) -> bool:
        """Say that all is done, and wait until everyone else is: peers may still read from us.

        Args:
            step: the last one.
            rule: why it was.
            finite: whether its loss was a number.

        Returns:
            False where another generation begins instead: somebody was lost before the end.
        """
        self.flush()
        self.meter()
        generation = self.form.generation if self.form else 0
        self._connection.send(Done(generation=generation, step=step, rule=rule, finite=finite))
        if self._next is None:
            answer = self._connection.wait_for(Release, Form)
            if isinstance(answer, Release):
                return True
            self._next = answer
        return False

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
