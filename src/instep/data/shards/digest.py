"""One SHA-256 of all samples in their order, which does not depend on how they lie in files.

Samples are hashed in blocks of `BLOCK` by their number: of each column the lengths of its rows,
where those differ, then the bytes of all rows, little-endian. The digest of all is that of the
columns' names and types, the number of samples, and the digests of all blocks. So blocks are hashed
by as many processes as there are, and a block tells which samples are not what was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from instep.data.shards.columns import Column, as_plain
from instep.data.shards.views import View
from instep.data.shards.writer import ShardFile

BLOCK = 4096
"""Samples of a block."""

SIZE = 32
"""Bytes of a block's digest."""


def blocks_of(samples: int) -> int:
    """How many blocks so many samples have."""
    return -(-samples // BLOCK)


def digest_blocks(files: Sequence[tuple[Path, int]], first: int, stop: int) -> Iterator[bytes]:
    """The digests of blocks [first, stop).

    Args:
        files: all shards in their order: path, and samples.
    """
    starts = np.concatenate([[0], np.cumsum([count for _, count in files])])
    total = int(starts[-1])
    at, opened = -1, None
    for block in range(first, stop):
        parts: list[list[View]] = []
        begin, end = block * BLOCK, min((block + 1) * BLOCK, total)
        while begin < end:
            number = int(np.searchsorted(starts, begin, "right")) - 1
            if number != at or opened is None:
                at, opened = number, ShardFile(files[number][0])
            last = min(end, int(starts[number + 1]))
            parts += opened.between(begin - int(starts[number]), last - int(starts[number]))
            begin = last
        yield _digest(parts)


def _digest(parts: list[list[View]]) -> bytes:
    found = hashlib.sha256()
    for column in zip(*parts, strict=True):
        for view in column:
            if view.offsets is not None:
                found.update(np.ascontiguousarray(view.lengths, "<i8").data)
        for view in column:
            elements = view.elements
            found.update(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)
    return found.digest()


def digest_of(columns: Sequence[Column], samples: int, blocks: Iterable[bytes]) -> str:
    """The digest of all samples, as hexadecimal digits."""
    found = hashlib.sha256(json.dumps([as_plain(columns), samples]).encode())
    for block in blocks:
        found.update(block)
    return found.hexdigest()
