"""What a worker of a preparation does: each task, in whatever process it is.

A file of results has another name until it is whole, and the same bytes whoever writes it. Way in:
`Doer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from instep.data.shards.digest import digest_blocks
from instep.data.shards.views import View, based, bytes_of
from instep.data.shards.writer import BATCH_BYTES, ShardWriter
from instep.plain_file import crc32_of
from instep.prepare.exchange import Exchange
from instep.prepare.mapping import Mapping
from instep.prepare.messages import (
    Again,
    Digest,
    Done,
    Head,
    Join,
    Map,
    Merge,
    Scan,
    Setup,
    Sort,
    Sum,
    Task,
)
from instep.prepare.results import wide_parts


class Doer:
    """Does tasks.

    Args:
        setup: what is prepared, and where results go.
        beat: told now and then where this process reads.

    Raises:
        InstepError: the user's function cannot be loaded.
    """

    def __init__(self, setup: Setup, beat: Callable[[str, int], None]) -> None:
        self._mapping = Mapping(setup.asked, Path(setup.folder), beat)
        self._exchange = Exchange(setup.asked, Path(setup.folder))

    def do(self, task: Task) -> Done:
        """Do one.

        Raises:
            InstepError: it cannot be done, and what follows cannot either.
        """
        match task:
            case Scan(number, piece):
                return Done(number, self._mapping.format(piece).scan(piece))
            case Head(number, pieces):
                return Done(number, self._mapping.head(pieces))
            case Map():
                return self._mapping.map(task)
            case Again(number, file):
                return Done(number, self._mapping.again(file))
            case Sort(number):
                return Done(number, self._exchange.sort(task))
            case Merge(number):
                return Done(number, self._exchange.merge(task))
            case Join(number):
                return Done(number, _join(task))
            case Digest(number, files, first, stop):
                paths = [(Path(file), samples) for file, samples in files]
                return Done(number, b"".join(digest_blocks(paths, first, stop)))
            case Sum(number, path, first, stop):
                return Done(number, crc32_of(path, first, stop))


def _join(task: Join) -> int:
    """A shard of parts of other files; returns its CRC-32."""
    with ShardWriter(Path(task.to), task.columns) as writer:
        held, size = list[list[View]](), 0
        for views in wide_parts(task.parts, task.columns):
            held.append(views)
            size += bytes_of(views)
            if size >= BATCH_BYTES:
                writer.write(_concatenated(held))
                held, size = [], 0
        if held:
            writer.write(_concatenated(held))
        writer.close()
    return writer.crc32


def _concatenated(parts: list[list[View]]) -> list[View]:
    if len(parts) == 1:
        return list(map(based, parts[0]))
    return [_one(list(column)) for column in zip(*parts, strict=True)]


def _one(views: list[View]) -> View:
    data = np.concatenate([view.elements for view in views])
    if views[0].offsets is None:
        return View(data)
    lengths = np.concatenate([view.lengths for view in views])
    return View(data, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
