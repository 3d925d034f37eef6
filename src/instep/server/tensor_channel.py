"""Connections between workers and the server: a question with a body of bytes, an answer with one.

Each worker has one, and none to other workers, so one that breaks is nobody else's affair. A thread
of the server waits for each; what arrives it hands to the server's main thread, which alone decides
anything. A worker shows the secret that it got from the master; the server accepts nobody else.
Between hosts connections are encrypted, and both ends have a certificate that says who they are.

Servers are connected to each other in the same way. What questions and answers mean is not known
here. Way in: `Door` on a server, `Line.to` on a worker.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from torch import Tensor

from instep.comm import metered
from instep.comm.encryption.certificates import is_worker
from instep.comm.protocol.channel import Address
from instep.errors import PeerError
from instep.system.processes import wait_readable
from instep.undecodable import UNDECODABLE

if TYPE_CHECKING:
    from instep.comm.encryption.certificates import Credentials
    from instep.comm.encryption.tls_socket import TlsSocket

LOOK_S = 0.1
"""How often a thread that waits looks whether it should."""

PROOF_S = 2.0
"""How long a caller may take to show the secret, in all."""

MOST_CALL = 1 << 8
"""Bytes of the message with which it shows it."""

MOST_HEAD = 1 << 20
"""Bytes of the longest question or answer, without its body."""

_SIZES = struct.Struct("!IQI")

Head = TypeVar("Head", bound=msgspec.Struct)


class Ask(msgspec.Struct, array_like=True):
    """A worker wants a lease; its body is what it has computed under the last one."""

    token: int = -1
    """Of that lease; -1 if there was none."""
    total: float = 0.0
    weight: float = 0.0
    skipped: int = 0
    present: list[bool] = []
    """As in `commits.Push`."""
    known: int = 0
    """The last step that it knows to be complete."""
    frozen: bool = False
    """Whether it wants no lease, but the parameters that are not trained, as the body."""
    unsure: int = -1
    """Without a token: that of a push, on an earlier connection, of which it does not know whether
    it was a commit; -1 if there was none."""


class Grant(msgspec.Struct, array_like=True):
    """A lease; its body is what to compute with. Or the end, without both."""

    counted: bool
    """Whether the push was a commit, this one or the one that the worker was unsure of."""
    complete: list[tuple[int, float, float | None]]
    """Steps that are complete, after the one that was known: number, loss, norm."""
    token: int = -1
    step: int = 0
    number: int = 0
    held_s: float = 0.0
    """How long there was nothing to lease."""
    ends: str = ""
    """The rule by which the run has ended; empty while it continues."""
    finite: bool = True
    """Whether its last loss was."""
    since: int = -1
    """As `coded.Given.since`."""


class ChannelCall(msgspec.Struct, array_like=True):
    """The first message of a channel: who calls, and the proof that it is of this run."""

    secret: bytes
    worker: int


class Line:
    """One end of a connection.

    Args:
        connection: what it is one end of.
        tls: on top of it, where connections are encrypted.
        sums: whether checksums of bodies are sent: who takes differences for long would not be
            right again after a wrong one.
    """

    def __init__(
        self, connection: socket.socket, tls: TlsSocket | None = None, *, sums: bool = False
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._tls, self._sums = connection, tls, sums
        self._wire: socket.socket | TlsSocket = tls or connection

    @classmethod
    def to(
        cls,
        address: Address,
        server: int,
        secret: bytes,
        worker: int,
        credentials: Credentials | None = None,
        *,
        sums: bool = False,
    ) -> Line:
        """Connect to the server.

        Args:
            address: where it is.
            server, worker: the numbers of both ends.
            secret: what the server wants to be shown.
            credentials: of this end, where connections are encrypted.
            sums: as for `Line`.

        Raises:
            PeerError: it is not there, or is another.
        """
        connection = None
        try:
            connection = socket.create_connection(address, timeout=PROOF_S)
            tls = None
            if credentials is not None:
                deadline = time.monotonic() + PROOF_S
                tls = encrypted(connection, credentials, deadline, server)
            line = cls(connection, tls, sums=sums)
            line.send(ChannelCall(secret, worker), ())
        except (OSError, PeerError) as error:
            if connection is not None:
                connection.close()
            raise PeerError(f"the server does not answer ({error}).") from None
        return line

    def send(self, head: msgspec.Struct, body: Sequence[Tensor]) -> None:
        """Send a head, and tensors of bytes.

        Raises:
            PeerError: the other end is gone.
        """
        encoded, parts = msgspec.msgpack.encode(head), [tensor.numpy().data for tensor in body]
        total = _sum(parts) if self._sums else 0
        sizes = _SIZES.pack(len(encoded), sum(part.nbytes for part in parts), total)
        try:
            self._socket.settimeout(None)
            self._wire.sendall(sizes + encoded)
            for part in parts:
                self._wire.sendall(part)
        except OSError as error:
            raise PeerError(f"the connection is gone ({error}).") from None

    def receive(
        self,
        kind: type[Head],
        body: Sequence[Tensor] | Callable[[Head], Sequence[Tensor]],
        waits: Callable[[], None] = lambda: None,
        *,
        most: int = MOST_HEAD,
    ) -> Head:
        """The next head; its body, if it has one, is written into tensors of bytes.

        Args:
            kind: what it is.
            body: [bytes] each, together as long as the body; or gives them once the head is known.
            waits: called now and then meanwhile; what it raises is raised here.
            most: bytes that it may have, without its body.

        Raises:
            PeerError: the other end is gone, or sends something else.
        """
        length, rest, total = _SIZES.unpack(self._take(_SIZES.size, waits))
        if length > most:
            raise PeerError(f"a message of {length} and {rest} bytes has arrived.")
        try:
            head = msgspec.msgpack.decode(self._take(length, waits), type=kind)
        except UNDECODABLE as error:
            raise PeerError(f"something that is no message has arrived: {error}") from None
        if not rest:
            return head
        parts = [tensor.numpy().data for tensor in (body(head) if callable(body) else body)]
        if rest != sum(part.nbytes for part in parts):
            raise PeerError(f"a message of {length} and {rest} bytes has arrived.")
        for part in parts:
            self._fill(part, waits)
        if self._sums and total != _sum(parts):
            raise PeerError("a message has arrived that is not what was sent.")
        return head

    def _take(self, size: int, waits: Callable[[], None]) -> bytearray:
        taken = bytearray(size)
        self._fill(memoryview(taken), waits)
        return taken

    def _fill(self, into: memoryview, waits: Callable[[], None]) -> None:
        looked = time.monotonic()
        while into.nbytes:
            if time.monotonic() - looked > LOOK_S:  # bytes may arrive one by one
                waits()
                looked = time.monotonic()
            try:
                self._socket.settimeout(LOOK_S)  # fails once another thread has closed it
                got = self._wire.recv_into(into)
            except TimeoutError:
                continue
            except OSError as error:
                raise PeerError(f"the connection is gone ({error}).") from None
            if not got:
                raise PeerError("the connection is gone (the other end closed it).")
            into = into[got:]

    @property
    def idle(self) -> bool:
        """Whether nothing has arrived, not even the end of the connection."""
        if self._tls is not None and self._tls.pending:
            return False
        return not wait_readable([self._socket.fileno()], 0)

    def close(self) -> None:
        """Close; other threads that use it find the connection gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        metered.close(self._socket)


def _sum(parts: Sequence[memoryview]) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total


def encrypted(
    connection: socket.socket, credentials: Credentials, deadline: float, server: int | None = None
) -> TlsSocket:
    """The same connection, after a handshake in which both ends have shown a certificate.

    Args:
        connection: to or from the other end.
        credentials: of this end.
        deadline: on the monotonic clock.
        server: the number of the server that is called; None if this is the one.
    """
    from instep.comm.encryption.tls import Tls, context
    from instep.comm.encryption.tls_socket import TlsSocket

    serves = server is None
    made = context(credentials, server=serves)
    tls = Tls(made, server=serves, accepted=partial(is_worker, number=server))
    return TlsSocket(connection, tls, deadline)


def secret_of(token: str, nonce: bytes) -> bytes:
    """What the workers of a run show a server: no file has it, and a new server wants another."""
    return hmac.digest(token.encode(), nonce, "sha256")
