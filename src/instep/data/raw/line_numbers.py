"""On which line of a raw file a place is, for messages."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from instep.data.raw import blocks
from instep.data.raw.base import Piece

_last: dict[tuple[str, int, bool], tuple[int, int]] = {}
"""Place and line that were asked for last, of each file: the next one is mostly behind them."""


def line_of(path: str | Path, place: int, returns: bool = False) -> int:
    """The number of the line that a place is on, from 1.

    Args:
        place: in the decompressed bytes.
        returns: whether a '\\r' without a '\\n' ends a line too.
    """
    whole = blocks.whole(path)
    if blocks.compression_of(path):
        return 1 + _line_ends(whole, place, returns)
    key = str(path), os.stat(path).st_mtime_ns, returns
    start, line = _last.get(key, (0, 1))
    if start > place:
        start, line = 0, 1
    line += _line_ends(replace(whole, start=start), place - start, returns)
    _last[key] = place, line
    return line


def _line_ends(piece: Piece, size: int, returns: bool) -> int:
    """In the first `size` bytes of a piece."""
    count, last = 0, b""
    for data, _ in blocks.bytes_of(piece):
        data = data[: max(size, 0)]
        count += data.count(b"\n")
        if returns and b"\r" in last + data:
            count += data.count(b"\r") - (last + data).count(b"\r\n")
        last, size = data[-1:], size - len(data)
        if size <= 0:
            break
    return count
