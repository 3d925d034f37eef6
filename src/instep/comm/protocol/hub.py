"""The channels of all processes that talk with this one."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from instep.comm.callers import NO_MORE_FILES, Unproven
from instep.comm.protocol.channel import (
    LARGEST,
    LARGEST_UNTRUSTED,
    MOST_UNTRUSTED,
    Address,
    Frames,
    frame,
    listen,
)
from instep.comm.protocol.messages import AnyMessage
from instep.errors import PeerError

if TYPE_CHECKING:
    import ssl

    from instep.comm.encryption.certificates import Identity
    from instep.comm.encryption.tls import Tls

MOST_HANDSHAKES = 4
"""Steps of TLS handshakes, of about 1 ms each, before messages are read again."""

ACCEPTED = 32
"""New connections that are accepted before messages are read again."""

FULL_S = 0.5
"""How long no connection is accepted after the process could open no more files."""


class Peer:
    """The master's end of one connection: sends without ever waiting."""

    def __init__(self, connection: socket.socket, largest: int, tls: Tls | None = None) -> None:
        self.socket, self.tls = connection, tls
        self.trusted = False
        """Whether it has shown the run's token."""
        self.frames = Frames(largest)
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
