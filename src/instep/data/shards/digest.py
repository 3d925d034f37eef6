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
from instep.data.shards.views import View, bytes_of
from instep.data.shards.writer import ShardFile

BLOCK = 4096
"""Samples of a block."""

SIZE = 32
"""Bytes of a block's digest."""

MOST_MAPPED = 8 << 20
"""Bytes that are read of a file before it is mapped anew."""


def blocks_of(samples: int) -> int:
    """How many blocks so many samples have."""
    return -(-samples // BLOCK)


def digest_blocks(files: Sequence[tuple[Path, int]], first: int, stop: int) -> Iterator[bytes]:
    """The digests of blocks [first, stop).

    Args:
        files: all shards in their order: path, and samples.
    """
    mapped = _Mapped(files)
    for block in range(first, stop):
        found = hashlib.sha256()
        begin, end = block * BLOCK, min((block + 1) * BLOCK, mapped.samples)
        for column in range(mapped.columns):
            for view in mapped.views(column, begin, end):
                if view.offsets is not None:
                    found.update(np.ascontiguousarray(view.lengths, "<i8").data)
            for view in mapped.views(column, begin, end):
                elements = view.elements
                found.update(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)
        yield found.digest()


class _Mapped:
    """The samples of files, of which this process has only some MB in memory at a time."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self._files = files
        self._starts = np.concatenate([[0], np.cumsum([count for _, count in files])])
        self._at, self._read = -1, 0
        self._open: ShardFile | None = None

    @property
    def samples(self) -> int:
        return int(self._starts[-1])

    @property
    def columns(self) -> int:
        return len(self._file(max(self._at, 0)).columns)

    def views(self, column: int, first: int, stop: int) -> Iterator[View]:
        """A column of the samples [first, stop), in parts as they lie in files."""
        while first < stop:
            number = int(np.searchsorted(self._starts, first, "right")) - 1
            file, begin = self._file(number), int(self._starts[number])
            batch = int(np.searchsorted(file.starts, first - begin, "right"))
            last = min(stop, begin + int(file.starts[batch]))
            for views in file.between(first - begin, last - begin):
                self._read += bytes_of(views[column : column + 1])
                yield views[column]
            first = last

    def _file(self, number: int) -> ShardFile:
        """A file; it is mapped anew now and then, for its pages count until it no longer is."""
        if self._open is None or number != self._at or self._read >= MOST_MAPPED:
            self._at, self._read = number, 0
            self._open = ShardFile(self._files[number][0])
        return self._open


def digest_of(columns: Sequence[Column], samples: int, blocks: Iterable[bytes]) -> str:
    """The digest of all samples, as hexadecimal digits."""
    found = hashlib.sha256(json.dumps([as_plain(columns), samples]).encode())
    for block in blocks:
        found.update(block)
    return found.hexdigest()
