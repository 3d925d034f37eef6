"""Parts of a worker's membership in its run: each class knows one conversation with the master.

Way in: `member.py:Member`, which has one of each.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from instep.comm.metered import tcp_traffic
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel_store import ChannelStore
from instep.comm.protocol.connection import MasterConnection
from instep.errors import PeerError
from instep.events import STEPS

FLUSH_S = 0.25
"""How often records leave for the master."""

TRAFFIC_S = 1.0
"""How often the kernel is asked for the bytes sent and received."""


class Released(Exception):
    """The run does not need this worker any more; no error."""


class GenerationLease:
    """Permission to commit in the present generation; the listening thread may end it."""

    def __init__(self, connection: MasterConnection) -> None:
        self._connection = connection
        self._generation = self._fenced = -1  # the one in which nothing more may be committed

    def begin(self, generation: int) -> None:
        """Allow commits in a generation that has just been formed."""
        self._generation = generation

    def fence(self) -> None:
        """Commit nothing more in the present generation."""
        self._fenced = self._generation

    @property
    def fenced(self) -> bool:
        """Whether nothing more may be committed in the present generation.

        Between hosts this is so once the master has not answered for a lease, and until the
        next generation.
        """
        if self._connection.lapsed:
            self.fence()
        return self._fenced == self._generation >= 0

    def check(self) -> None:
        """Raise PeerError if nothing more may be committed in the present generation."""
        if self.fenced:
            raise PeerError("the master did not answer for too long: the others may continue.")


class StopDecisions:
    """Stops and verdicts of the master; `listen` has those that arrived given to `take`."""

    def __init__(self, connection: MasterConnection, listen: Callable[[], None]) -> None:
        self._connection, self._listen = connection, listen
        self._stop: m.Stop | None = None
        self._verdicts: deque[m.Verdict] = deque()
        self._asked = self._answered = 0

    def take(self, message: m.Stop | m.Verdict) -> None:
        """Note a message that arrived."""
        if isinstance(message, m.Stop):
            self._stop = message
        else:
            self._verdicts.append(message)

    def rule(self, step: int) -> str | None:
        """The rule by which the run is to stop with this step, if it is; does not wait."""
        self._listen()
        stop = self._stop
        return stop.rule if stop and (stop.after is None or step > stop.after) else None

    def forget(self, step: int) -> None:
        """Forget a stop that came from a step after this one, to which the worker went back.

        The master repeats the stop to the next generation if it still holds.
        """
        if self._stop is not None and self._stop.after is not None and self._stop.after >= step:
            self._stop = None

    def tell(self, figures: m.Figures) -> None:
        """Send figures to the master; `verdict` returns the answer."""
        self._asked += 1
        self._connection.send(msgspec.structs.replace(figures, number=self._asked))

    def verdict(self) -> m.Verdict:
        """Wait for the answer to the oldest figures without one."""
        while True:
            waiting = self._verdicts
            answer = waiting.popleft() if waiting else self._connection.inbox.wait_for(m.Verdict)
            if answer.number > self._answered:  # else a second master has answered too
                self._answered = answer.number
                return answer


class RecordSender:
    """Records of a worker's steps that have not been sent yet, and its traffic."""

    def __init__(self, connection: MasterConnection, number: int) -> None:
        self._connection, self._number = connection, number
        self._ledger = bytearray()
        self._steps: list[tuple[Any, ...]] = []
        self._flushed = self._metered = time.monotonic()

    def add(self, ledger: bytes, steps: tuple[Any, ...]) -> None:
        """Record one committed step.

        Args:
            ledger: its records, on the worker that has written them; elsewhere empty.
            steps: how long it took, values in the order of `STEPS`'s fields.
        """
        self._ledger += ledger
        self._steps.append(steps)
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send the records, and about once a second the traffic."""
        now = time.monotonic()
        self._flushed = now
        if self._steps:
            ledger, steps = bytes(self._ledger), np.array(self._steps, STEPS).tobytes()
            self._ledger.clear()
            self._steps.clear()
            self._connection.send(m.Records(ledger=ledger, steps=steps))
        if now - self._metered > TRAFFIC_S:
            self.meter()

    def meter(self) -> None:
        """Report the bytes sent and received so far."""
        self._metered = time.monotonic()
        fields = {"worker": self._number, **tcp_traffic()._asdict()}
        self._connection.send(m.Emit(name="traffic", fields=fields))


class RunStore:
    """Values that workers leave for each other, for those that do not see the run's folder.

    A wait raises Released once the run does not need this worker, and PeerError if there is no
    master any more. Set `Member.phase` around it, as for `Member.replica_store`.
    """

    def __init__(self, connection: MasterConnection, number: int) -> None:
        self._connection, self._number = connection, number

    def set(self, key: str, value: bytes) -> None:
        """Leave something for other workers; `get` returns it there."""
        self._open().set(key, value)

    def get(self, key: str) -> bytes:
        """What another worker has left; waits for it."""
        return self._open().get(key)

    def share(self, group: str, own: bytes) -> dict[str, bytes]:
        """Leave something in a group of keys; what workers have left there so far, by number."""
        store, key = self._open(), f"{group}/{self._number}"
        store.set(key, own)
        store.get(key)
        return store.found

    def _open(self) -> ChannelStore:
        return ChannelStore(self._connection, "run/", released=Released)


class PredictionTurns:
    """Batches that a worker is to predict, and what it reports of them."""

    def __init__(self, connection: MasterConnection) -> None:
        self._connection = connection

    def ready(self) -> None:
        """Report that this worker can predict."""
        self._connection.send(m.Built(recovers=True))

    def arrived(self, *, wait: bool) -> list[list[int]]:
        """Turns to predict that have arrived.

        Args:
            wait: wait for some; without it the list may be empty.

        Raises:
            Released: it was waited for, and there are no more.
        """
        found: list[list[int]] = []
        while True:
            waits = wait and not found
            message = self._connection.inbox.wait_for() if waits else self._connection.inbox.poll()
            match message:
                case None:
                    return found
                case m.Predict(batches=batches):
                    found.append(batches)
                case m.Release() if waits:
                    raise Released
                case m.Release():
                    self._connection.inbox.put_back(message)
                    return found

    def predicted(self, batch: int) -> None:
        """Report that the part of a batch is in its place."""
        self._connection.send(m.Predicted(batch=batch))
