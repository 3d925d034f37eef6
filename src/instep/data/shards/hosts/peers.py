"""Gets samples that lie on other hosts of the run, by asking their doors.

A worker sets `present` before it reads its dataset, and its loader processes inherit it.
`dataset.py` asks it for rows of a shard that does not lie on this host. Who has the shard is
on the `board`; if nobody answers, it is asked again with growing pauses, as another worker may
take the place of a lost one. Way in: `Peers.rows`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from instep.comm.encryption.certificates import Credentials, is_worker
from instep.data.shards.columns import Column
from instep.data.shards.hosts.board import Board, PeerDoor
from instep.data.shards.hosts.sent_rows import (
    AskBytes,
    AskRows,
    RowsAnswer,
    Show,
    Wire,
    receive,
    receive_bytes,
    receive_views,
    send,
)
from instep.data.shards.views import Array, View
from instep.errors import PeerError, one_line

CONNECT_S = 5.0
"""How long a door may take to let us in."""

SILENT_S = 20.0
"""How long it may send nothing: it may be busy."""

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses before all are asked again."""

T = TypeVar("T")

_Lines: TypeAlias = dict[tuple[str, int], tuple[socket.socket, Wire]]

present: Peers | None = None
"""Those of the run that this process belongs to."""


def use(found: Peers | None) -> None:
    """Let datasets of this process, and of those that it forks, ask these."""
    global present
    present = found


class Peers:
    """The other workers, as sources of samples.

    Args:
        board: their doors.
        token: of the run.
        credentials: what this process shows; None where connections are not encrypted.
    """

    def __init__(self, board: Board, token: str, credentials: Credentials | None = None) -> None:
        self.board, self._token, self._credentials = board, token, credentials
        self.wrong = ""
        """The answer of the last one that did not give what it was asked for."""
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._lines: _Lines = {}

    def rows(
        self,
        dataset: str,
        shard: int,
        wanted: Array | None,
        columns: Sequence[Column],
        chosen: Sequence[int],
        count: int,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> list[View] | None:
        """Rows of a shard that another host has.

        Args:
            dataset: the `sha256` of its manifest.
            shard: its number.
            wanted: [count] int64, the rows; None for all.
            columns: of the dataset.
            chosen: numbers of those that are wanted.
            count: of rows.
            pauses_s: before each further attempt.

        Returns:
            A view for each chosen column; None if nobody has the shard, or no holder answers.
        """
        packed = None if wanted is None else np.ascontiguousarray(wanted, "<i8").tobytes()
        ask = AskRows(dataset, shard, list(chosen), packed)
        kinds = [columns[at] for at in chosen]

        def take(wire: Wire, answer: RowsAnswer) -> list[View]:
            return receive_views(wire, answer, kinds, count)

        return self._asked(ask, take, pauses_s)

    def bytes_of(self, dataset: str, shard: int, first: int, size: int) -> bytes | None:
        """Bytes of the file of a shard that another host has; None if none gives them now."""

        def take(wire: Wire, answer: RowsAnswer) -> bytes:
            return receive_bytes(wire, answer, size)

        return self._asked(AskBytes(dataset, shard, first, size), take, ())

    def _asked(
        self,
        ask: AskRows | AskBytes,
        take: Callable[[Wire, RowsAnswer], T],
        pauses_s: Sequence[float],
    ) -> T | None:
        with self._lock:
            for pause_s in (0.0, *pauses_s):
                time.sleep(pause_s)
                for door in self._doors(ask.dataset, ask.shard):
                    if (found := self._ask(door, ask, take)) is not None:
                        return found
        return None

    def close(self) -> None:
        """Close the connections of this process; the next question opens others."""
        with self._lock:
            for connection, _ in self._open.values():
                connection.close()
            self._open.clear()

    def _doors(self, dataset: str, shard: int) -> list[PeerDoor]:
        """The doors that have a shard; each process begins with another one."""
        found = [door for door in self.board.read() if door.has(dataset, shard)]
        turn = os.getpid() % len(found) if found else 0
        return [*found[turn:], *found[:turn]]

    def _ask(
        self, door: PeerDoor, ask: AskRows | AskBytes, take: Callable[[Wire, RowsAnswer], T]
    ) -> T | None:
        """Take what a door answers with; None if it does not, or has no such shard."""
        where = door.host, door.port
        for known in (True, False):  # a connection of before may be gone
            if known and where not in self._open:
                continue
            try:
                wire = self._open[where][1] if known else self._connected(where, door)
                send(wire, ask)
                answer = receive(wire, RowsAnswer)
                if answer is None:
                    raise PeerError("the connection has ended.")
                if answer.wrong:
                    self.wrong = f"worker {door.worker} ({door.node}): {answer.wrong}"
                    return None
                return take(wire, answer)
            except (OSError, PeerError) as error:
                self.wrong = f"worker {door.worker} ({door.node}): {one_line(error)}"
                if where in self._open:
                    self._open.pop(where)[0].close()
        return None

    @property
    def _open(self) -> _Lines:
        """Connections of this process; those of one that has forked it are not ours."""
        if self._process != os.getpid():
            self._process, self._lines = os.getpid(), {}
        return self._lines

    def _connected(self, where: tuple[str, int], door: PeerDoor) -> Wire:
        connection = socket.create_connection(where, CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire: Wire = connection
            if self._credentials is not None:
                from instep.comm.encryption.tls import Tls, context
                from instep.comm.encryption.tls_socket import TlsSocket

                made = context(self._credentials, server=False)
                meant = door.worker
                tls = Tls(made, server=False, accepted=lambda peer: is_worker(peer, meant))
                wire = TlsSocket(connection, tls, time.monotonic() + CONNECT_S)
            send(wire, Show(self._token))
            connection.settimeout(SILENT_S)
        except BaseException:
            connection.close()
            raise
        self._open[where] = connection, wire
        return wire


class NoPeers(Peers):
    """Gives nothing, where the samples of a participant stay on its host."""

    def __init__(self) -> None:
        super().__init__(Board(), "")
        self.wrong = "the data of a participant whose sums are secure stay on its host"

    def rows(self, *given: object, **named: object) -> None:
        """Nobody is asked."""
