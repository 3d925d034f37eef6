"""Messages over a stream socket: the worker's end, and the master's many ends.

A frame is four bytes of length, big-endian, then one message. A frame longer
than `LARGEST` or one that is no message closes the connection it came on.
Between machines the frames are encrypted (`tls.py`). Nothing here knows what a message means.
"""

from __future__ import annotations

import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from instep.comm.callers import NO_MORE_FILES, Unproven
from instep.comm.protocol.messages import AnyMessage, decode, encode
from instep.errors import PeerError
from instep.undecodable import UNDECODABLE

if TYPE_CHECKING:
    import ssl

    from instep.comm.encryption.certificates import Identity
    from instep.comm.encryption.tls import Tls

LARGEST = 64 * 1024 * 1024
"""Bytes of the longest frame that is taken in."""

LARGEST_UNTRUSTED = 4096
"""The same, from a peer that has not shown the run's token yet."""

MOST_UNTRUSTED = 64
"""Connections of peers that have not shown the run's token yet; the oldest is dropped. A run that
expects more processes at once allows more."""

MOST_HANDSHAKES = 4
"""Steps of TLS handshakes, of about 1 ms each, before messages are read again."""

ACCEPTED = 32
"""New connections that are accepted before messages are read again."""

CONNECT_S = 10.0
"""How long to wait for a master that does not answer at all, unless another time is given."""

FULL_S = 0.5
"""How long no connection is accepted after the process could open no more files."""

Wanted = TypeVar("Wanted", bound=AnyMessage)

_LENGTH = struct.Struct("!I")


class Address(NamedTuple):
    """Where a master listens."""

    host: str
    port: int


def listen(host: str = "127.0.0.1") -> socket.socket:
    """A socket at a port of its own, on which masters accept connections."""
    return socket.create_server((host, 0), backlog=1024)


class _Frames:
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
        self._frames = _Frames()
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


class Peer:
    """The master's end of one connection: sends without ever waiting."""

    def __init__(self, connection: socket.socket, largest: int, tls: Tls | None = None) -> None:
        self.socket, self.tls = connection, tls
        self.trusted = False
        """Whether it has shown the run's token."""
        self.frames = _Frames(largest)
        self.unsent = bytearray()
        self.waits_to_send = False
        """Whether the socket took less than there was."""
        self.since = time.monotonic()
        """When it connected, on the monotonic clock."""

    @property
    def shown(self) -> Identity | None:
        """What its certificate says it is; None where connections are not encrypted."""
        return None if self.tls is None else self.tls.peer

    @property
    def certificate(self) -> bytes:
        """That certificate, DER; empty where there is none."""
        return b"" if self.tls is None else self.tls.certificate

    @property
    def address(self) -> str:
        """Of the other end; empty once it has left."""
        with suppress(OSError):
            return str(self.socket.getpeername()[0])
        return ""

    def __repr__(self) -> str:
        return f"Peer({self.socket.fileno()})"


class Hub:
    """The master's connections, all in one thread, which none of them blocks.

    Args:
        listener: a listening socket; by default a new one on loopback.
        largest: bytes of the longest frame of a peer, until its `frames.largest` is raised.
        context: for TLS; without it connections are not encrypted.
    """

    def __init__(
        self,
        listener: socket.socket | None = None,
        *,
        largest: int = LARGEST_UNTRUSTED,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._largest, self._context = largest, context
        self._listener = listener or listen()
        self._listener.setblocking(False)
        self.untrusted = Unproven[Peer](MOST_UNTRUSTED)
        """Peers that have not shown the run's token yet."""
        self._full_until = 0.0
        self._buffer = memoryview(bytearray(1 << 18))  # `recv` would map so much for each message
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        name = self._listener.getsockname()
        self.address = Address(name[0], name[1])

    def fileno(self) -> int:
        """For `select` and its kin: readable when something has arrived."""
        return self._selector.fileno()

    def receive(self, timeout_s: float) -> Iterator[tuple[Peer, AnyMessage | None]]:
        """Whatever arrives within `timeout_s`; None from a peer whose connection is closed."""
        if self._full_until and time.monotonic() > self._full_until:
            self._full_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        handshakes = 0
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                for _ in range(ACCEPTED):
                    if not self._accept():
                        break
                continue
            peer: Peer = key.data
            if peer.tls is not None and peer.tls.peer is None:
                handshakes += 1
                if handshakes > MOST_HANDSHAKES:
                    continue  # it is next
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ and peer.socket.fileno() >= 0:
                yield from self._read(peer)

    def _accept(self) -> bool:
        """Accept one connection; whether there may be another."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_MORE_FILES:
                self._make_room()
            return False  # none is waiting, or it was closed before it was accepted
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(connection, self._largest, self._tls())
        self._selector.register(connection, selectors.EVENT_READ, peer)
        for oldest in self.untrusted.add(peer):
            self.drop(oldest)
        return True

    def _tls(self) -> Tls | None:
        if self._context is None:
            return None
        from instep.comm.encryption.tls import Tls

        return Tls(self._context, server=True, accepted=lambda peer: peer.role != "master")

    def _make_room(self) -> None:
        """No file can be opened: drop unauthenticated peers, and accept none for a moment."""
        for peer in self.untrusted:
            self.drop(peer)
        self._selector.unregister(self._listener)  # else `select` would return at once
        self._full_until = time.monotonic() + FULL_S

    def trust(self, peer: Peer) -> None:
        """A peer has shown the run's token: it may stay, and send long frames."""
        self.untrusted.remove(peer)
        peer.trusted, peer.frames.largest = True, LARGEST

    def _read(self, peer: Peer) -> Iterator[tuple[Peer, AnyMessage | None]]:
        try:
            length = peer.socket.recv_into(self._buffer)
            plain: bytes | memoryview = self._buffer[:length]
            if length and peer.tls is not None:
                plain, answer = peer.tls.open(plain)
                self._write(peer, answer)
            messages = peer.frames.feed(plain) if plain else []
        except BlockingIOError:
            return
        except (OSError, PeerError):
            length, messages = 0, []
        for message in messages:
            if length and peer.socket.fileno() < 0:
                return  # it was dropped for an earlier one
            yield peer, message
        if not length:
            self.drop(peer)
            yield peer, None

    def send(self, peer: Peer, message: AnyMessage) -> None:
        """Queue one message; what the socket cannot take now goes out later."""
        data = frame(message)
        self._write(peer, data if peer.tls is None else peer.tls.seal(data))

    def _write(self, peer: Peer, data: bytes) -> None:
        sent = 0
        if data and not peer.unsent:
            try:
                sent = peer.socket.send(data)
            except BlockingIOError:
                pass
            except OSError:
                return  # it is gone; reading from it says so
        if sent < len(data):
            peer.unsent += data[sent:]
            self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            while peer.unsent:
                sent = peer.socket.send(peer.unsent)
                del peer.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()  # it is gone; reading from it says so
        if peer.socket.fileno() >= 0 and bool(peer.unsent) != peer.waits_to_send:
            peer.waits_to_send = bool(peer.unsent)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            self._selector.modify(peer.socket, wanted, peer)

    def peers(self) -> list[Peer]:
        """All peers that are connected."""
        if self._listener.fileno() < 0:
            return []
        found = (key.data for key in self._selector.get_map().values())
        return [peer for peer in found if isinstance(peer, Peer)]

    def late(self, seconds: float) -> list[Peer]:
        """Peers that connected longer ago, and have not shown the run's token yet."""
        now = time.monotonic()
        return [peer for peer in self.untrusted if now - peer.since > seconds]

    def drain(self, peer: Peer) -> Iterator[AnyMessage]:
        """All messages of a peer that is gone, to the last; closes its connection."""
        while peer.socket.fileno() >= 0 and (arrived := list(self._read(peer))):
            yield from (message for _, message in arrived if message is not None)
        self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Close a peer's connection; a second call does nothing."""
        self.untrusted.remove(peer)
        if peer.socket.fileno() >= 0:
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """Close all connections and stop listening; a second call does nothing."""
        if self._listener.fileno() < 0:
            return
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Peer):
                self.drop(key.data)
        self._listener.close()
        self._selector.close()
