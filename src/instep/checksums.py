"""Checksums in the files of a run, so that a changed digit is noticed.

A line of text ends with a field that has the CRC-32 of what is before it. Lines without one, of
earlier versions, are valid too, up to the first that has one (`tables_of`). Records of a binary
file have theirs in a file of their own. Knows nothing of what lines and records mean.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import starmap
from typing import Any

import msgspec
import numpy as np

FIELD = "crc32"
"""The last field of a line."""

CHECKSUM = np.dtype("<u4")
"""Of one record."""

_END = re.compile(rb', "%s": "([0-9a-f]{8})"}' % FIELD.encode())
_DECODE = msgspec.json.Decoder().decode
_END_BYTES = len(f', "{FIELD}": "01234567"}}')


class WrongChecksum(ValueError):
    """A line is not what was written."""


def line_of(table: dict[str, Any]) -> bytes:
    """A table as a line of JSON with its checksum; other values than JSON's become text."""
    text = json.dumps(table, default=str)[:-1].encode()
    return b'%s, "%s": "%08x"}\n' % (text, FIELD.encode(), zlib.crc32(text))


def table_of(line: bytes) -> Any:
    """The value of a line of JSON, without its checksum.

    Raises:
        WrongChecksum: it has one, and it is another.
        ValueError: the line is not JSON.
    """
    return _read(line)[0]


def _read(line: bytes) -> tuple[Any, bool]:
    """The value of a line, and whether it has a checksum."""
    line = line.rstrip(b"\r\n")
    end = _END.fullmatch(line[-_END_BYTES:])
    if end and int(end[1], 16) != zlib.crc32(line[:-_END_BYTES]):
        raise WrongChecksum("it does not match its checksum")
    try:
        table = _DECODE(line)
    except (ValueError, RecursionError):  # NaN and infinity are read by json alone
        table = json.loads(line.decode())
    if isinstance(table, dict):
        table.pop(FIELD, None)
    return table, end is not None


def tables_of(lines: Iterable[bytes]) -> Iterator[Any]:
    """`table_of` each line of a file from its beginning, a last one that was cut short left out.

    Raises:
        WrongChecksum: a line does not match its checksum, or has none after one that has.
        ValueError: a line is not JSON.
    """
    summed = False
    for line in lines:
        if not line.endswith(b"\n"):
            return
        table, has_one = _read(line)
        if summed and not has_one:
            raise WrongChecksum("it has no checksum, and a line before it has one")
        summed |= has_one
        yield table


def of_records(data: bytes, size: int) -> np.ndarray[Any, Any]:
    """The checksum of each record of `size` bytes, [records] of `CHECKSUM`."""
    records = struct.iter_unpack(f"{size}s", data)
    return np.fromiter(starmap(zlib.crc32, records), CHECKSUM, len(data) // size)
