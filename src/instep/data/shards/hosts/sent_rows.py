"""Rows of a shard as they go over a connection: a head, then the bytes of each column.

The same frames go both ways, between a door (`door.py`) and who asks (`peers.py`). Nothing here
knows who they are. Ways in: `taken`, `send`, `receive`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from instep.data.shards.columns import Column
from instep.data.shards.views import Array, View
from instep.data.shards.writer import ShardFile
from instep.errors import PeerError
from instep.undecodable import UNDECODABLE

MOST_HEAD = 1 << 26
"""Bytes of the longest head: the numbers of the rows are in it."""

MOST_STRANGE = 1 << 12
"""That of a caller who has not shown the token of the run yet."""

_LENGTH = struct.Struct("!I")

Head = TypeVar("Head", bound=msgspec.Struct)


class Show(msgspec.Struct, frozen=True, array_like=True):
    """First on a connection: the run's token."""

    token: str


class AskRows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Which rows of which shard are wanted."""

    dataset: str
    """The `sha256` of its manifest."""
    shard: int
    columns: list[int]
    """By their numbers in the manifest."""
    rows: bytes | None = None
    """[n] int64, little-endian; None for all."""


class AskBytes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Which bytes of the file of a shard are wanted, for a copy of it."""

    dataset: str
    """The `sha256` of its manifest."""
    shard: int
    first: int
    size: int


class RowsAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Announces what follows: for each column the bytes of its values, and those of its offsets; or
    those of a file, and 0."""

    sizes: list[tuple[int, int]]
    wrong: str = ""
    """Why nothing follows."""


class Wire(Protocol):
    """A socket, encrypted or not."""

    def sendall(self, data: bytes | memoryview, /) -> object:
        """Send all of it."""

    def recv_into(self, into: memoryview, /) -> int:
        """Receive something; 0 at the end."""


def taken(file: ShardFile, rows: Array, columns: Sequence[int]) -> list[View]:
    """Rows of a shard, as views of memory of their own, for each of some columns.

    Args:
        file: the shard.
        rows: [n] int64, from 0, in any order.
        columns: by their numbers.
    """
    batches = np.searchsorted(file.starts, rows, "right") - 1
    return [_column(file, rows, batches, at) for at in columns]


def _column(file: ShardFile, rows: Array, batches: Array, at: int) -> View:
    column = file.columns[at]
    if not column.ragged:
        values = np.empty((len(rows), *column.shape), column.element)
        for batch in np.unique(batches).tolist():
            here = batches == batch
            values[here] = file.views(batch)[at].data[rows[here] - file.starts[batch]]
        return View(values)
    each = [
        file.views(batch)[at].row(row)
        for batch, row in zip(batches.tolist(), (rows - file.starts[batches]).tolist(), strict=True)
    ]
    offsets = np.cumsum([0, *map(len, each)], dtype=np.int64)
    values = np.concatenate(each) if each else np.empty((0, *column.row_shape), column.element)
    return View(values, offsets)


def send(wire: Wire, head: msgspec.Struct, views: Sequence[View] = ()) -> None:
    """Send a head, and the bytes of views.

    Raises:
        OSError: the connection is gone.
    """
    encoded = msgspec.msgpack.encode(head)
    wire.sendall(_LENGTH.pack(len(encoded)) + encoded)
    for view in views:
        for array in (view.data, view.offsets):
            if array is not None and array.nbytes:
                wire.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def sizes_of(views: Sequence[View]) -> list[tuple[int, int]]:
    """Sizes of views, for an answer."""
    return [(v.data.nbytes, 0 if v.offsets is None else v.offsets.nbytes) for v in views]


def receive(wire: Wire, kind: type[Head], most: int = MOST_HEAD) -> Head | None:
    """The next head; None at the end of the connection.

    Raises:
        PeerError: what has come is none.
        OSError: the connection is gone.
    """
    found: Head | None = _head(wire, kind, most)
    return found


def receive_ask(wire: Wire) -> AskRows | AskBytes | None:
    """The next question; None at the end of the connection.

    Raises:
        PeerError, OSError: as `receive`.
    """
    found: AskRows | AskBytes | None = _head(wire, AskRows | AskBytes, MOST_HEAD)
    return found


def _head(wire: Wire, kind: Any, most: int) -> Any:
    start = _filled(wire, _LENGTH.size, ends=True)
    if start is None:
        return None
    (length,) = _LENGTH.unpack(start)
    if length > most:
        raise PeerError(f"a message of {length} bytes has come.")
    try:
        return msgspec.msgpack.decode(_filled(wire, length) or b"", type=kind)
    except UNDECODABLE as error:
        raise PeerError(f"something that is no message has come: {error}.") from None


def receive_views(
    wire: Wire, answer: RowsAnswer, columns: Sequence[Column], rows: int
) -> list[View]:
    """The views that an answer says follow it.

    Raises:
        PeerError: they are not those of so many rows.
        OSError: the connection is gone.
    """
    if len(answer.sizes) != len(columns):
        raise PeerError(f"{len(answer.sizes)} columns have come, of {len(columns)}.")
    views = []
    for column, (size, offsets) in zip(columns, answer.sizes, strict=True):
        row = column.element.itemsize * int(np.prod(column.row_shape, dtype=np.int64))
        wanted = 8 * (rows + 1) if column.ragged else 0
        if size % row or offsets != wanted or (not column.ragged and size != rows * row):
            raise PeerError(f"column {column.name!r} has come in {size} and {offsets} bytes.")
        data = np.frombuffer(_filled(wire, size) or b"", column.element)
        data = data.reshape(size // row, *column.row_shape)
        bounds = np.frombuffer(_filled(wire, offsets) or b"", "<i8") if column.ragged else None
        if bounds is not None and (
            bounds[0] or bounds[-1] != len(data) or (np.diff(bounds) < 0).any()
        ):
            raise PeerError(f"column {column.name!r} has come with offsets that make no sense.")
        views.append(View(data, bounds))
    return views


def receive_bytes(wire: Wire, answer: RowsAnswer, size: int) -> bytes:
    """The bytes of a file that an answer says follow it.

    Raises:
        PeerError: they are others than so many.
        OSError: the connection is gone.
    """
    if answer.sizes != [(size, 0)]:
        raise PeerError(f"{answer.sizes} bytes of a file have come, of {size}.")
    return bytes(_filled(wire, size) or b"")


def _filled(wire: Wire, size: int, *, ends: bool = False) -> bytearray | None:
    """So many bytes; None if the connection `ends` before the first."""
    try:
        found = bytearray(size)
    except (MemoryError, OverflowError, ValueError):
        raise PeerError(f"{size:,} bytes are announced, for which there is no memory.") from None
    left = memoryview(found)
    while left.nbytes:
        got = wire.recv_into(left)
        if not got:
            if ends and left.nbytes == size:
                return None
            raise PeerError("the connection has ended.")
        left = left[got:]
    return found
