"""Gives samples that lie here to workers of other hosts, by shard and row, and bytes for copies.

A caller shows a certificate of the run where connections are encrypted, and the run's token in
any case; who does not is not answered. A thread serves each caller, so samples are given while the
worker computes. Way in: `OpenDoor`.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

import numpy as np

from instep.comm.encryption.certificates import Credentials, is_worker
from instep.comm.protocol.listener import Listener
from instep.data.shards.hosts import sent_rows
from instep.data.shards.hosts.sent_rows import AskBytes, AskRows, RowsAnswer, Show
from instep.data.shards.writer import ShardFile
from instep.errors import InstepError, PeerError
from instep.plain_file import plain

PROOF_S = 5.0
"""How long a caller may take to prove what it is."""

MOST_FILES = 256
"""Files that are kept open."""

MOST_BYTES = 1 << 20
"""Bytes of a file in one answer."""


class Files(Protocol):
    """A dataset of which some files are here."""

    def local_file(self, number: int, /) -> ShardFile | None:
        """One of them; None if it is not here."""


class OpenDoor:
    """Listens, and serves callers until it is closed.

    Args:
        host: the address to listen on.
        datasets: what there is, by the `sha256` of the manifest; more may be added.
        token: of the run.
        credentials: of this end; None where connections are not encrypted.
    """

    def __init__(
        self,
        host: str,
        datasets: Mapping[str, Files],
        token: str,
        credentials: Credentials | None = None,
    ) -> None:
        self._datasets, self._token, self._credentials = datasets, token, credentials
        self.samples = self.bytes = 0
        """Given so far."""
        self._counting = threading.Lock()
        self._files = lru_cache(MOST_FILES)(self._file)
        self._listener = Listener(host, self._serve, "instep gives samples")
        self.address: tuple[str, int] = self._listener.address

    def close(self) -> None:
        """Let nobody in; a second call does nothing."""
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        # One that is gone, or is no worker of this run, is told nothing.
        with suppress(OSError, PeerError):
            wire = self._proven(connection)
            while (ask := sent_rows.receive_ask(wire)) is not None:
                self._answer(wire, ask)

    def _proven(self, connection: socket.socket) -> sent_rows.Wire:
        connection.settimeout(PROOF_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire: sent_rows.Wire = connection
        if self._credentials is not None:
            from instep.comm.encryption.tls import Tls, context
            from instep.comm.encryption.tls_socket import TlsSocket

            tls = Tls(context(self._credentials, server=True), server=True, accepted=is_worker)
            wire = TlsSocket(connection, tls, time.monotonic() + PROOF_S)
        shown = sent_rows.receive(wire, Show, sent_rows.MOST_STRANGE)
        if shown is None or not hmac.compare_digest(shown.token.encode(), self._token.encode()):
            raise PeerError("it has not shown the token of the run.")
        if not self._listener.proved(connection):
            raise PeerError("it was dropped meanwhile.")
        connection.settimeout(None)
        return wire

    def _answer(self, wire: sent_rows.Wire, ask: AskRows | AskBytes) -> None:
        try:
            if isinstance(ask, AskBytes):
                data = self._read(ask)
                sent_rows.send(wire, RowsAnswer(sizes=[(len(data), 0)]))
                wire.sendall(data)
                return
            file, wanted = self._asked(ask)
            views = sent_rows.taken(file, wanted, ask.columns)
        except (InstepError, IndexError, ValueError) as error:
            sent_rows.send(wire, RowsAnswer(sizes=[], wrong=str(error)))
            return
        sizes = sent_rows.sizes_of(views)
        with self._counting:
            self.samples, self.bytes = self.samples + len(wanted), self.bytes + sum(map(sum, sizes))
        sent_rows.send(wire, RowsAnswer(sizes=sizes), views)

    def _asked(self, ask: AskRows) -> tuple[ShardFile, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        file = self._files(ask.dataset, ask.shard)
        if ask.rows is None:
            return file, np.arange(len(file), dtype=np.int64)
        wanted = np.frombuffer(ask.rows, "<i8").astype(np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(file):
            raise PeerError("this shard does not have all these rows.")
        return file, wanted

    def _read(self, ask: AskBytes) -> bytes:
        path = self._files(ask.dataset, ask.shard).path
        try:
            with open(path, "rb", opener=plain) as file:
                file.seek(ask.first)
                return file.read(min(ask.size, MOST_BYTES))
        except OSError as error:  # of the file, and not of the connection
            raise PeerError(f"{path} cannot be read: {error.strerror or error}.") from None

    def _file(self, dataset: str, number: int) -> ShardFile:
        known = self._datasets.get(dataset)
        if known is None:
            raise PeerError("there is no such dataset here.")
        file = known.local_file(number)
        if file is None:
            raise PeerError("this shard is not here.")
        return file
