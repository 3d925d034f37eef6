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
from typing import NamedTuple

import numpy as np

from instep.data.shards.columns import Column, as_plain
from instep.data.shards.views import View
from instep.data.shards.writer import MOST_MAPPED, ShardFile

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
    mapped = _Mapped(files)
    for block in range(first, stop):
        found = hashlib.sha256()
        parts = list(mapped.parts(block * BLOCK, min((block + 1) * BLOCK, mapped.samples)))
        for column in range(len(parts[0].views)):
            for part in parts:
                if part.views[column].offsets is not None:
                    found.update(np.ascontiguousarray(part.views[column].lengths, "<i8").data)
            for part in parts:
                elements = np.ascontiguousarray(part.views[column].elements)
                found.update(elements.reshape(-1).view(np.uint8).data)
                mapped.was_read(part, elements.nbytes)
        yield found.digest()


class _Part(NamedTuple):
    """Some samples, as they lie in a file."""

    file: ShardFile
    views: list[View]


class _Mapped:
    """The samples of files, of which this process has only some MB in memory at a time."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self._files = files
        self._starts = np.concatenate([[0], np.cumsum([count for _, count in files])])
        self._at = -1
        self._open: ShardFile | None = None
        self._read = dict[ShardFile, int]()

    @property
    def samples(self) -> int:
        return int(self._starts[-1])

    def parts(self, first: int, stop: int) -> Iterator[_Part]:
        """The samples [first, stop)."""
        while first < stop:
            number = int(np.searchsorted(self._starts, first, "right")) - 1
            file, begin = self._file(number), int(self._starts[number])
            last = min(stop, int(self._starts[number + 1]))
            for views in file.between(first - begin, last - begin):
                yield _Part(file, views)
            first = last

    def was_read(self, part: _Part, size: int) -> None:
        """Let a file go now and then: its pages count as memory until then."""
        self._read[part.file] = self._read.get(part.file, 0) + size
        if self._read[part.file] >= MOST_MAPPED:
            part.file.let_go()
            self._read[part.file] = 0

    def _file(self, number: int) -> ShardFile:
        if self._open is None or number != self._at:
            self._at, self._open = number, ShardFile(self._files[number][0])
            self._read.clear()
        return self._open


def digest_of(columns: Sequence[Column], samples: int, blocks: Iterable[bytes]) -> str:
    """The digest of all samples, as hexadecimal digits."""
    found = hashlib.sha256(json.dumps([as_plain(columns), samples]).encode())
    for block in blocks:
        found.update(block)
    return found.hexdigest()
