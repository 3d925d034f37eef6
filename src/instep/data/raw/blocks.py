"""The bytes of a raw file in blocks, as they are or decompressed.

A gzip file is one piece. A zstd file is cut where its frames begin, so `start` and `stop` of its
pieces are places in the compressed file; all other places are in the decompressed bytes. Nothing
here knows lines or records. Way in: `bytes_of`.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from msgspec.structs import replace

from instep.data.raw.base import Piece
from instep.data.raw.opened import opened, size_of
from instep.data.raw.zstd import frames_of
from instep.errors import DataError, one_line

BLOCK = 1 << 20
"""Bytes that are read at a time."""

BEYOND = 1 << 16
"""Bytes that are read at a time behind the end of a piece, to finish its last record."""

STATE_BITS = 3
"""Lowest bits of `Piece.state`, for the format; those above are the place of `start` in the
decompressed bytes, where a file is compressed."""


def compression_of(path: str | Path) -> str:
    """'gzip' or 'zstd' by the suffix of a file, else ''."""
    return {".gz": "gzip", ".zst": "zstd"}.get(Path(path).suffix.lower(), "")


def place_of(piece: Piece) -> int:
    """Where a piece begins in the decompressed bytes."""
    return piece.state >> STATE_BITS if compression_of(piece.path) else piece.start


def whole(path: str | Path) -> Piece:
    """All bytes of a file.

    Raises:
        DataError: it does not exist, or cannot be looked at.
    """
    try:
        return Piece(str(path), "", 0, size_of(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def cut_bytes(path: Path, target: int, name: str, learned: str = "") -> list[Piece]:
    """Cut a file of lines or records into pieces of about `target` bytes, of format `name`."""
    compression, size = compression_of(path), whole(path).stop
    if size == 0:
        return []
    if compression == "gzip":
        return [Piece(str(path), name, 0, size, 0, learned)]
    if compression == "zstd":
        return _cut_frames(path, target, name, learned)
    count = max(1, round(size / target))
    cuts = [size * i // count for i in range(count + 1)]
    return [
        Piece(str(path), name, start, stop, 0, learned)
        for start, stop in itertools.pairwise(cuts)
        if start < stop
    ]


def _cut_frames(path: Path, target: int, name: str, learned: str) -> list[Piece]:
    """Frames together, until they have `target` bytes; scanned if a frame does not say its size."""
    frames = list(frames_of(path))
    scan = any(frame.size is None for frame in frames)
    pieces, start, place, size = [], 0, 0, 0
    for frame in frames:
        size += frame.stop - frame.start if scan else frame.size or 0
        if size >= target or frame is frames[-1]:
            state = 0 if scan else place << STATE_BITS
            pieces.append(Piece(str(path), name, start, frame.stop, state, learned, scan))
            start, place, size = frame.stop, place + size, 0
    return [replace(pieces[0], scan=False)] if len(pieces) == 1 else pieces


def bytes_of(piece: Piece) -> Iterator[tuple[bytes, bool]]:
    """Blocks from the start of a piece to the end of its file, and whether each is of the piece.

    Raises:
        DataError: the file is damaged, or has changed since it was cut.
    """
    try:
        with opened(piece.path) as file:
            size = size_of(piece.path)
            if size < piece.stop:
                raise DataError(
                    f"{piece.path} has {size:,} bytes, and had {piece.stop:,} or more when it was "
                    "cut: it has changed. Start again, and leave it as it is meanwhile."
                )
            yield from _OPENERS[compression_of(piece.path)](file, piece)
    except OSError as error:
        raise DataError(f"{piece.path} cannot be read: {error.strerror or error}.") from error


def _plain(file: BinaryIO, piece: Piece) -> Iterator[tuple[bytes, bool]]:
    file.seek(piece.start)
    place = piece.start
    while place < piece.stop:
        data = file.read(min(BLOCK, piece.stop - place))
        if not data:
            raise DataError(f"{piece.path} was cut short while it was read, at byte {place:,}.")
        place += len(data)
        yield data, True
    while data := file.read(BEYOND):
        yield data, False


def _gzip(file: BinaryIO, piece: Piece) -> Iterator[tuple[bytes, bool]]:
    stream = gzip.GzipFile(fileobj=file)
    for data in _decompressed(stream, piece, 0, BLOCK):
        yield data, True


def _zstd(file: BinaryIO, piece: Piece) -> Iterator[tuple[bytes, bool]]:
    place = place_of(piece)
    for data in _decompressed(_zstd_stream(file, piece.start, piece.stop), piece, place, BLOCK):
        place += len(data)
        yield data, True
    end = size_of(piece.path)
    for data in _decompressed(_zstd_stream(file, piece.stop, end), piece, place, BEYOND):
        place += len(data)
        yield data, False


_OPENERS = {"": _plain, "gzip": _gzip, "zstd": _zstd}


def _zstd_stream(file: BinaryIO, start: int, stop: int) -> Any:
    pa = pyarrow("zstd files")
    return pa.CompressedInputStream(pa.PythonFile(_Range(file, start, stop), mode="r"), "zstd")


class _Range:
    """A file of which only a range can be read."""

    closed = False

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self._file, self._place, self._stop = file, start, stop

    def read(self, size: int = -1) -> bytes:
        left = self._stop - self._place
        self._file.seek(self._place)
        data = self._file.read(left if size < 0 else min(size, left))
        self._place += len(data)
        return data

    def close(self) -> None:
        """Leave the file open: another range of it is read next."""


def _decompressed(stream: Any, piece: Piece, place: int, size: int) -> Iterator[bytes]:
    """Blocks of `size` bytes of a stream that begins at `place`."""
    while True:
        try:
            data = stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{piece.path} is damaged or cut short: it can be decompressed up to byte "
                f"{place:,} or some more of what it holds ({one_line(error)}). Get it again."
            ) from error
        if not data:
            return
        place += len(data)
        yield data


def pyarrow(what: str) -> Any:
    """The package, which an extra installs.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError(
            f"{what} are read by pyarrow, which is not installed: pip install 'instep[data]'"
        ) from error
    return pa
