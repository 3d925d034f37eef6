"""Files that have columns: Parquet, cut at row groups, and Arrow IPC, cut at record batches.

Columns come as they are, nested ones too. Rows and batches are counted from 0, as pyarrow does.
Ways in: `Parquet`, `Arrow`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.data.raw.base import Chunk, Piece, SingleFiles
from instep.data.raw.blocks import pyarrow, whole
from instep.data.raw.opened import is_elsewhere, opened
from instep.errors import DataError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

_BYTES = 4 << 20
"""Of a chunk, about."""

_ROWS = 8192
"""Rows of a chunk at most, where columns have text or lists: one that repeats a value is larger
than its file says."""

_ROW_BITS = 32
"""Lowest bits of a place in an Arrow file: the row. Those above are the batch."""


@contextmanager
def _reading(path: str | Path, kind: str) -> Iterator[Any]:
    """pyarrow, whose errors say which file they are about.

    Raises:
        DataError: pyarrow cannot read the file, or is not installed.
    """
    pa = pyarrow(f"{kind} files")
    try:
        yield pa
    except (FileNotFoundError, PermissionError) as error:
        said = os.strerror(error.errno or 0)
        raise DataError(f"{path} cannot be read: {said}.") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged or cut short, or no {kind} file: {one_line(error)}. Get it again."
        ) from error


def _grouped(sizes: Sequence[int], target: int) -> Iterator[tuple[int, int]]:
    """Ranges of things that have `target` bytes together."""
    start, size = 0, 0
    for number, one in enumerate(sizes, 1):
        size += one
        if size >= target or number == len(sizes):
            yield start, number
            start, size = number, 0


def _rows_of(rows: int, size: int) -> int:
    """How many rows make a chunk, where so many have so many bytes."""
    return max(1, min(_ROWS, _BYTES * rows // max(size, 1)))


def _width(pa: Any, schema: pa.Schema) -> int:
    """Bytes of a row, where all columns are numbers; else 0."""
    kinds = pa.types
    if not all(kinds.is_integer(t) or kinds.is_floating(t) for t in schema.types):
        return 0
    bits: int = sum(kind.bit_width + 1 for kind in schema.types)  # and whether it is there
    return -(-bits // 8)


class Parquet(SingleFiles):
    """Parquet files; a place is the number of a row."""

    suffixes = (".parquet", ".pq")

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut at row groups, by their bytes before compression."""
        with _reading(path, "Parquet"):
            from pyarrow import parquet

            about = parquet.read_metadata(path)
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        pieces, row = [], 0
        for start, stop in _grouped([group.total_byte_size for group in groups], target):
            pieces.append(Piece(str(path), "parquet", start, stop, row))
            row += sum(group.num_rows for group in groups[start:stop])
        return pieces

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Decode some rows at a time, on this thread alone."""
        row = piece.state
        with _reading(piece.path, "Parquet") as pa:
            from pyarrow import parquet

            file = parquet.ParquetFile(
                _source(piece.path), buffer_size=1 << 20, page_checksum_verification=True
            )
            with file:
                _check(piece, file.metadata.num_row_groups)
                width = _width(pa, file.schema_arrow)
                for number in range(piece.start, piece.stop):
                    group = file.metadata.row_group(number)
                    count = width and max(1, _BYTES // width)
                    count = count or _rows_of(group.num_rows, group.total_byte_size)
                    for batch in file.iter_batches(count, [number], use_threads=False):
                        yield Chunk(batch, range(row, row + batch.num_rows), [])
                        row += batch.num_rows

    def where(self, path: Path, place: int) -> str:
        """The row."""
        return f"row {place}"


def _check(piece: Piece, count: int) -> None:
    if piece.stop > count:
        raise DataError(
            f"{piece.path} has {count:,} groups of rows, and had {piece.stop:,} or more when it "
            "was cut: it has changed. Start again, and leave it as it is meanwhile."
        )


class Arrow(SingleFiles):
    """Arrow IPC, files and streams; a place is the number of a batch, and of a row in it."""

    suffixes = (".arrow", ".feather", ".arrows", ".ipc")

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut at record batches; a stream with dictionaries is one piece."""
        size = whole(path).stop
        with _reading(path, "Arrow") as pa, pa.memory_map(str(path)) as source:
            if _is_file(path):
                count = pa.ipc.open_file(source).num_record_batches
                sizes = [size // max(count, 1)] * count
            else:
                sizes, apart = _batch_sizes(pa, source)
                target = target if apart else 1 << 62
        return [Piece(str(path), "arrow", start, stop) for start, stop in _grouped(sizes, target)]

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Map batches into memory, some rows at a time."""
        with _reading(piece.path, "Arrow") as pa, _mapped(pa, piece.path) as source:
            for number, batch in _batches(pa, source, piece):
                count = _rows_of(batch.num_rows, batch.nbytes)
                for row in range(0, batch.num_rows, count):
                    part = batch.slice(row, count)
                    part.validate(full=True)  # what is wrong in a file would end the process
                    first = (number << _ROW_BITS) + row
                    yield Chunk(part, range(first, first + part.num_rows), [])

    def where(self, path: Path, place: int) -> str:
        """The batch and its row."""
        return f"batch {place >> _ROW_BITS}, row {place & (1 << _ROW_BITS) - 1}"


def _source(path: str) -> Any:
    """Choose what pyarrow reads: the path, which it maps or reads ahead from, or an open file."""
    return opened(path) if is_elsewhere(path) else path


def _mapped(pa: Any, path: str) -> Any:
    return pa.PythonFile(opened(path), "r") if is_elsewhere(path) else pa.memory_map(path)


def _is_file(path: str | Path) -> bool:
    """Whether it is in the file format, which has a magic number; else it is a stream."""
    with opened(path) as file:
        return file.read(6) == b"ARROW1"


def _batch_sizes(pa: Any, source: Any) -> tuple[list[int], bool]:
    """Bytes of each record batch of a stream, and whether each can be read without the others."""
    sizes, apart = [], True
    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type == "record batch":
            sizes.append(message.body.size)
        apart = apart and message.type != "dictionary"
    return sizes, apart


def _batches(pa: Any, source: Any, piece: Piece) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches of a piece, with their numbers."""
    wanted = range(piece.start, piece.stop)
    if _is_file(piece.path):
        reader = pa.ipc.open_file(source)
        _check(piece, reader.num_record_batches)
        yield from ((number, reader.get_batch(number)) for number in wanted)
    elif piece.start == 0:
        yield from islice(enumerate(pa.ipc.open_stream(source)), piece.stop)
    else:
        messages = pa.ipc.MessageReader.open_stream(source)
        schema = pa.ipc.read_schema(messages.read_next_message())
        for number, message in enumerate(islice(messages, piece.stop)):
            if number in wanted:
                yield number, pa.ipc.read_record_batch(message, schema)
