"""The server's end of tensor channels: who may connect, and what each asks for."""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from instep.comm.protocol.listener import Listener
from instep.errors import PeerError
from instep.server.coding import Wrapped

if TYPE_CHECKING:
    from instep.comm.encryption.certificates import Credentials
from instep.server.tensor_channel import (
    MOST_CALL,
    PROOF_S,
    Ask,
    ChannelCall,
    Line,
    encrypted,
    secret_of,
)


class Guest:
    """A process that is connected to a server."""

    def __init__(self, door: Door, line: Line, worker: int) -> None:
        self.worker, self.body = worker, door.room()
        """What it has sent with its last question."""
        self._door, self._line = door, line
        self._answers = queue.SimpleQueue[tuple[msgspec.Struct, Sequence[Tensor]] | None]()

    def answer(self, head: msgspec.Struct, body: Sequence[Tensor] = ()) -> None:
        """Answer its question; the body is not to change before the next one."""
        self._answers.put((head, body))

    def close(self) -> None:
        """Answer nothing more."""
        self._answers.put(None)
        self._line.close()

    def _serve(self) -> None:
        door = self._door
        with suppress(PeerError):
            while True:
                ask = self._line.receive(door.asks, self.body.flats, door.check)
                door.arrived(self, ask)
                answer = self._answers.get()
                if answer is None:
                    break
                self._line.send(*answer)
        self._line.close()
        door.arrived(self, None)


class Door:
    """Where workers connect to a server.

    Args:
        host: the address to listen on.
        room: gives what the body of a worker's questions goes into.
        credentials: of this end, where connections are encrypted.
        token: of the run.
        most: how many callers may come at once.
        asks: what questions are.
        sums: as for `Line`; at both ends alike.
    """

    def __init__(
        self,
        host: str,
        room: Callable[[], Wrapped],
        credentials: Credentials | None = None,
        *,
        token: str = "",
        most: int = 0,
        asks: Any = Ask,
        sums: bool = False,
    ) -> None:
        self.asks, self._sums = asks, sums
        self.nonce = secrets.token_bytes(16)
        self.secret = secret_of(token, self.nonce)
        """What a worker has to show."""
        self.room, self._credentials = room, credentials
        self._arrivals = queue.SimpleQueue[tuple[Guest, Any]]()
        self._late: Callable[[Guest, Any], bool] | None = None
        self._ending = threading.Lock()
        self._listener = Listener(host, self._admit, "instep serves", most=most)
        self.address = self._listener.address

    def next(self, timeout_s: float) -> tuple[Guest, Any] | None:
        """A question; or None in place of it, from one that is gone. None if nothing arrives."""
        try:
            return self._arrivals.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None

    def end(self, late: Callable[[Guest, Any], bool]) -> None:
        """From now on questions are for this, whichever thread is busy.

        Args:
            late: called in the guest's thread; those of which it says False wait for `next`.
        """
        with self._ending:
            self._late = late
        waiting = list(iter(lambda: self.next(0), None))
        for guest, ask in waiting:
            self.arrived(guest, ask)

    def go_on(self) -> None:
        """The end was none."""
        with self._ending:
            self._late = None

    def arrived(self, guest: Guest, ask: Any) -> None:
        """A question has come, or the end of a connection; in the guest's thread."""
        with self._ending:
            if self._late is None or (ask is not None and not self._late(guest, ask)):
                self._arrivals.put((guest, ask))

    def check(self) -> None:
        """Raise PeerError once the door is closed."""
        if self._listener.closed:
            raise PeerError("the server has ended.")

    def close(self) -> None:
        """Let nobody in; connections end. A second call does nothing."""
        self._listener.close()

    def _admit(self, connection: socket.socket) -> None:
        with suppress(PeerError, OSError):
            guest = self._proven(connection)
            self._listener.proved(connection)
            guest._serve()

    def _proven(self, connection: socket.socket) -> Guest:
        """The worker at the other end.

        Raises:
            PeerError: it is none of this run.
        """
        deadline = time.monotonic() + PROOF_S

        def waits() -> None:
            if time.monotonic() > deadline:
                raise PeerError("no proof in time.")

        tls = None
        if self._credentials is not None:
            tls = encrypted(connection, self._credentials, deadline)
        line = Line(connection, tls, sums=self._sums)
        call = line.receive(ChannelCall, (), waits, most=MOST_CALL)
        if tls is not None and tls.peer.number != call.worker:
            raise PeerError(f"worker {tls.peer.number} shows up as {call.worker}.")
        if not hmac.compare_digest(call.secret, self.secret):
            raise PeerError("it does not know the secret.")
        return Guest(self, line, call.worker)
