"""Mutual TLS 1.3 between the processes of a run, on bytes: no socket is known here.

Both ends show a certificate of the run's authority (`certificates.py`). An end that is not
satisfied sends no alert: it closes, whatever was wrong, so a stranger learns nothing. No
session is resumed and no early data taken, so captured bytes are worth nothing.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable
from typing import IO, Any

from instep.comm.encryption.certificates import Credentials, Identity
from instep.errors import StrangerError

Accepted = Callable[[Identity], bool]
"""Whether the process at the other end is the one that is meant."""

_FILES = "/dev/fd"
"""Where an open file has a name by its number."""

_RECORD = 1 << 14  # bytes of the longest record of TLS


def context(credentials: Credentials, *, server: bool, newcomers: bool = False) -> ssl.SSLContext:
    """What one end of every connection needs.

    Args:
        credentials: of this end; a newcomer has no certificate.
        server: whether it is the end that accepts.
        newcomers: whether it takes newcomers too; they get what `accepted` of `Tls` says.

    Raises:
        ValueError: the credentials are damaged.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # certificates name processes, and `identity_of` reads them
    made.verify_mode = ssl.CERT_OPTIONAL if newcomers else ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    if server:
        made.num_tickets = 0
    try:
        made.load_verify_locations(cadata=credentials.authority)
        if credentials.own:
            with _private_file() as file:  # ssl reads keys from files only
                file.write(credentials.own.encode())
                file.flush()
                made.load_cert_chain(f"{_FILES}/{file.fileno()}")
    except (ssl.SSLError, TypeError, ValueError) as error:
        raise ValueError(f"the credentials are damaged ({error})") from None
    return made


def _private_file() -> IO[bytes]:
    """Without a name, so that nothing is left of it, however this process ends."""
    if hasattr(os, "memfd_create"):  # and on no disk
        return open(os.memfd_create("key"), "wb")
    return tempfile.TemporaryFile()


def identity_of(connection: ssl.SSLObject) -> Identity:
    """What the other end's certificate says, after the handshake.

    Raises:
        StrangerError: it names no process of a run.
    """
    shown = connection.getpeercert()
    if shown is None:  # as `context` allows for newcomers
        return Identity("newcomer")
    names: Any = shown.get("subjectAltName", ())
    try:
        ((_, uri),) = names
        return Identity.of(uri)
    except ValueError:
        raise StrangerError("the other end's certificate names no process of a run.") from None


class Tls:
    """One end of an encrypted connection: what to send, and what has arrived.

    Used by one thread at a time. What is sent before the handshake is over follows it.

    Args:
        made: of `context`.
        server: whether this is the end that accepts.
        accepted: whether the other end is the one that is meant.
    """

    def __init__(self, made: ssl.SSLContext, *, server: bool, accepted: Accepted) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = made.wrap_bio(self._arrived, self._leaving, server_side=server)
        self._accepted = accepted
        self._waiting = bytearray()
        self.peer: Identity | None = None
        """The other end, once it has proved what it is."""

    @property
    def certificate(self) -> bytes:
        """What the other end has shown, DER; empty from a newcomer. After the handshake."""
        return self._tls.getpeercert(binary_form=True) or b""

    def begin(self) -> bytes:
        """What to send first."""
        self._shake_hands()
        return self._leaving.read()

    def seal(self, data: bytes | memoryview) -> bytes:
        """What to send for some bytes; nothing yet, if the handshake is not over."""
        if self.peer is None:
            self._waiting += data
            return b""
        self._tls.write(data)
        return self._leaving.read()

    def open(self, data: bytes | memoryview) -> tuple[bytes, bytes]:
        """The bytes that some bytes of the connection stand for, and what to send now.

        Raises:
            StrangerError: the other end is not what it should be, or something was changed on the
                way.
        """
        self._arrived.write(data)
        found = bytearray()
        try:
            if self.peer is None:
                self._shake_hands()
            while self.peer is not None and (some := self._tls.read(_RECORD)):
                found += some
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:  # no alert is sent: it would say what is wrong
            raise StrangerError(f"the connection is not one of this run ({error}).") from None
        return bytes(found), self._leaving.read()

    def open_into(self, data: bytes | memoryview, into: memoryview) -> int:
        """Like `open`, after the handshake: as many bytes as there is room for; the rest stays.

        Raises:
            StrangerError: something was changed on the way.
        """
        self._arrived.write(data)
        count = 0
        try:
            while count < len(into):
                got: Any = self._tls.read(len(into) - count, into[count:])
                if not got:
                    break
                count += got
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise StrangerError(f"the connection is not one of this run ({error}).") from None
        return count

    @property
    def pending(self) -> bool:
        """Whether bytes have arrived that were not opened yet."""
        return bool(self._arrived.pending or self._tls.pending())

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        peer = identity_of(self._tls)
        if not self._accepted(peer):
            raise StrangerError(f"the other end is {peer.uri}, which is not meant.")
        self.peer = peer
        if self._waiting:
            self._tls.write(self._waiting)
            self._waiting.clear()
