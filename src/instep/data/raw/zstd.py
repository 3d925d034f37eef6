"""Where the frames of a zstd file begin, and how many bytes each holds.

Only headers are read (RFC 8878), nothing is decompressed. A frame may leave out how many bytes it
holds; what streams write does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from instep.errors import DataError

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPED = range(0x184D2A50, 0x184D2A60)
"""First four bytes of a frame that holds nothing."""


class Frame(NamedTuple):
    """Places in the compressed file; bytes that it holds, or None where it does not say."""

    start: int
    stop: int
    size: int | None


class _ShortError(Exception):
    """The file ends too early."""


def frames_of(path: Path) -> Iterator[Frame]:
    """All frames of a file, in their order.

    Raises:
        DataError: it is not a zstd file, or is cut short.
    """
    with path.open("rb") as file:
        start, end = 0, path.stat().st_size
        while start < end:
            size, whole = None, True
            try:
                size = _pass_frame(file)
            except _ShortError:
                whole = False
            except ValueError as error:
                raise DataError(
                    f"{path} is damaged, or no zstd file: {error} at byte {start:,}."
                ) from error
            stop = file.tell()
            if not whole or stop > end:
                raise DataError(
                    f"{path} is cut short: the frame that begins at byte {start:,} is not whole. "
                    "Get it again."
                )
            yield Frame(start, stop, size)
            start = stop


def _take(file: BinaryIO, count: int) -> int:
    """A little-endian number of so many bytes."""
    data = file.read(count)
    if len(data) < count:
        raise _ShortError
    return int.from_bytes(data, "little")


def _pass_frame(file: BinaryIO) -> int | None:
    """Go to the end of a frame; the bytes that it holds."""
    magic = _take(file, 4)
    if magic in _SKIPPED:
        file.seek(_take(file, 4), 1)
        return 0
    if magic.to_bytes(4, "little") != _MAGIC:
        raise ValueError("no frame begins")
    size, checksum = _header(file)
    last = False
    while not last:
        block = _take(file, 3)
        last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
        if kind == 3:
            raise ValueError("a block of an unknown kind is in the frame")
        file.seek(1 if kind == 1 else length, 1)
    file.seek(checksum, 1)
    return size


def _header(file: BinaryIO) -> tuple[int | None, int]:
    """Bytes that a frame holds, and bytes of its checksum."""
    flags = _take(file, 1)
    single = flags >> 5 & 1
    file.seek((0 if single else 1) + (0, 1, 2, 4)[flags & 3], 1)
    width = (single, 2, 4, 8)[flags >> 6]
    size = _take(file, width) + (256 if width == 2 else 0) if width else None
    return size, 4 * (flags >> 2 & 1)
