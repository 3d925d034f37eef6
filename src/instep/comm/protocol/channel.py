"""Messages over a stream socket: the worker's end; the master's many ends are in `hub.py`.

A frame is four bytes of length, big-endian, then one message. A frame longer
than `LARGEST` or one that is no message closes the connection it came on.
Between machines the frames are encrypted (`tls.py`). Nothing here knows what a message means.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from instep.comm.protocol.messages import AnyMessage, decode, encode
from instep.errors import PeerError
from instep.undecodable import UNDECODABLE

if TYPE_CHECKING:
    import ssl

    from instep.comm.encryption.tls import Tls

LARGEST = 64 * 1024 * 1024
"""Bytes of the longest frame that is taken in."""

LARGEST_UNTRUSTED = 4096
"""The same, from a peer that has not shown the run's token yet."""

MOST_UNTRUSTED = 64
"""Connections of peers that have not shown the run's token yet; the oldest is dropped. A run that
expects more processes at once allows more."""


CONNECT_S = 10.0
"""How long to wait for a master that does not answer at all, unless another time is given."""


Wanted = TypeVar("Wanted", bound=AnyMessage)

_LENGTH = struct.Struct("!I")


class Address(NamedTuple):
    """Where a master listens."""

    host: str
    port: int


def listen(host: str = "127.0.0.1") -> socket.socket:
    """A socket at a port of its own, on which masters accept connections."""
    return socket.create_server((host, 0), backlog=1024)


class Frames:
    """Bytes that have come, cut into frames."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._bytes = bytearray()
        self.largest = largest

    def feed(self, data: bytes | memoryview) -> list[AnyMessage]:
        """Every message that `data` completes.

        Raises:
            PeerError: the other end does not speak this protocol.
        """
        if not self._bytes and len(data) >= _LENGTH.size:  # usually one message, whole
            (length,) = _LENGTH.unpack_from(data)
            if len(data) == _LENGTH.size + length and length <= self.largest:
                return [_message(data[_LENGTH.size :])]
        self._bytes += data
        found: list[AnyMessage] = []
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            if length > self.largest:
                raise PeerError(f"a frame of {length} bytes arrived; {self.largest} is the most.")
            if len(self._bytes) - at - _LENGTH.size < length:
                break
            found.append(_message(self._bytes[at + _LENGTH.size : at + _LENGTH.size + length]))
            at += _LENGTH.size + length
        del self._bytes[:at]
        return found


def _message(frame: bytes | bytearray | memoryview) -> AnyMessage:
    try:
        found: AnyMessage = decode(frame)
        return found
    except UNDECODABLE as error:
        raise PeerError(f"something that is no message arrived: {error}") from None


def frame(message: AnyMessage) -> bytes:
    """A message as it goes over the wire."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


class Channel:
    """A process's end of its connection to the master.

    Used from one thread; or from two, of which one sends and one receives.
    """

    def __init__(self, connection: socket.socket, tls: Tls | None = None) -> None:
        self._socket, self._tls = connection, tls
        self._sending = threading.Lock()  # encrypted bytes leave in the order they were made
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready = select.poll()
        self._ready.register(connection, select.POLLIN)
        self._frames = Frames()
        self._inbox: deque[AnyMessage] = deque()
        if tls is not None:
            connection.sendall(tls.begin())

    @classmethod
    def connect(
        cls,
        address: Address,
        timeout_s: float | None = None,
        context: ssl.SSLContext | None = None,
    ) -> Channel:
        """Connect to a master; with a `context`, to one that proves that it is this run's.

        It does so when it is read from, and nothing is sent to it before.

        Raises:
            PeerError: no master listens there, or none answers where no time is given.
            TimeoutError: the address cannot be reached, or does not answer in that time.
        """
        try:
            connection = socket.create_connection(address, timeout=timeout_s or CONNECT_S)
            connection.settimeout(None)
            return cls(connection, None if context is None else _calling(context))
        except OSError as error:
            if timeout_s is not None and not isinstance(error, ConnectionRefusedError):
                raise TimeoutError(str(error)) from None
            raise PeerError(
                f"no master answers at {address.host}:{address.port} ({error})."
            ) from None

    def give_up_after(self, seconds: float) -> None:
        """Have the connection break once what was sent stays unanswered for so long (Linux)."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = int(1000 * seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def fileno(self) -> int:
        """For `select` and its kin."""
        return self._socket.fileno()

    def send(self, message: AnyMessage) -> None:
        """Send one message; PeerError if the master is gone."""
        try:
            data = frame(message)
            with self._sending:
                self._socket.sendall(data if self._tls is None else self._tls.seal(data))
        except OSError as error:
            raise PeerError(f"the master is gone ({error}).") from None

    def wait(self, timeout_s: float | None) -> bool:
        """Whether something has arrived, or does so within a time; None waits for ever."""
        if self._inbox:
            return True
        return bool(self._ready.poll(None if timeout_s is None else timeout_s * 1000))

    def read(self) -> list[AnyMessage]:
        """All messages that are here; waits for bytes if there are none.

        Raises:
            PeerError: the master is gone.
        """
        if not self._inbox:
            self._read()
        found = list(self._inbox)
        self._inbox.clear()
        return found

    def receive(self, timeout_s: float | None = None) -> AnyMessage:
        """The next message; waits for it, None for ever.

        Raises:
            PeerError: the master is gone.
            TimeoutError: it has not arrived in that time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            if deadline is not None and not self.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no answer in time")
            self._read()
        return self._inbox.popleft()

    def wait_for(self, wanted: type[Wanted], timeout_s: float | None = None) -> Wanted:
        """The next message of one class; others that arrive before it stay for later.

        Raises:
            PeerError: the master is gone.
            TimeoutError: it has not arrived in that time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        passed: list[AnyMessage] = []
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            message = self.receive(left_s)
            if isinstance(message, wanted):
                self._inbox.extendleft(reversed(passed))
                return message
            passed.append(message)

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise PeerError(f"the master is gone ({error}).") from None
        if not data:
            raise PeerError("the master is gone (it closed the connection).")
        if self._tls is not None:
            data = self._opened(self._tls, data)
        self._inbox.extend(self._frames.feed(data))

    def _opened(self, tls: Tls, data: bytes) -> bytes:
        with self._sending:
            found, answer = tls.open(data)
            try:
                self._socket.sendall(answer)
            except OSError as error:
                raise PeerError(f"the master is gone ({error}).") from None
        return found

    def close(self) -> None:
        """Close; a second call does nothing."""
        self._socket.close()


def why_failed(error: Exception) -> str:
    """Why a connection failed, without our own words around it."""
    text = str(error).rpartition("(")[2].rstrip(").") or str(error)
    return text.partition("] ")[2] or text


def _calling(context: ssl.SSLContext) -> Tls:
    from instep.comm.encryption.tls import Tls

    return Tls(context, server=False, accepted=lambda peer: peer.role == "master")
