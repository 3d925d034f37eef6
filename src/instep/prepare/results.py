"""Writes the result of a task: its samples in a file, and what they are like beside them.

The file that says so is written last: a result counts once it is there. Way in: `write`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.data.shards.arrow_in import cast
from instep.data.shards.columns import Column, Misfit
from instep.data.shards.encode import Encoded
from instep.data.shards.manifest import lines_of
from instep.data.shards.statistics import Figures, take_batch
from instep.data.shards.views import View
from instep.data.shards.writer import ShardFile, ShardWriter
from instep.errors import DataError
from instep.plain_file import crc32_of, replace_plain
from instep.prepare.messages import Mapped, Segment


class Wider(Exception):
    """A sample needs wider columns than the file has: the task begins again with them."""

    def __init__(self, columns: list[Column]) -> None:
        super().__init__()
        self.columns = columns


class Noted(NamedTuple):
    """Counts of the records of a task, and those that are bad."""

    records: int
    bad: list[dict[str, Any]]
    only_bad: dict[str, int]
    """Files of which it has bad records alone, with how many."""


def wide_parts(parts: Sequence[Segment], columns: Sequence[Column]) -> Iterator[list[View]]:
    """The samples of parts of files, as columns that hold all of them have them.

    Raises:
        DataError: a column cannot hold one of the numbers.
    """
    for part in parts:
        for views in ShardFile(Path(part.file)).between(part.first, part.first + part.samples):
            try:
                wide = [cast(view, column) for view, column in zip(views, columns, strict=True)]
            except Misfit as error:
                raise DataError(f"{error}.") from None
            yield wide


def write(
    folder: Path,
    key: str,
    columns: list[Column],
    batches: Iterable[Encoded],
    notes: Callable[[], Noted],
) -> dict[str, Any]:
    """Write the samples of a task, and its result.

    Args:
        folder: of results.
        key: of the task.
        columns: of its samples.
        batches: the samples.
        notes: called once they are written.

    Returns:
        The result, as plain data.

    Raises:
        Wider: a batch has wider columns; nothing is left behind.
        OSError: it cannot be written; nothing is left behind.
    """
    figures = [Figures() for _ in columns]
    path = folder / f"{key}.arrow"
    with ShardWriter(path, columns) as writer:
        for batch in batches:
            if batch.columns != columns:
                raise Wider(batch.columns)
            if batch.views and batch.views[0].rows:
                writer.write(batch.views)
                take_batch(figures, columns, batch.views)
        writer.close()
    records, bad, only_bad = notes()
    if lines := lines_of(bad):
        replace_plain(folder / f"{key}.bad", lines)
    result = Mapped(
        key=key,
        samples=writer.samples,
        bytes=writer.bytes,
        records=records,
        bad=len(bad),
        only_bad=only_bad,
        columns=columns,
        figures=figures,
        parts=[Segment(str(path), 0, writer.samples)],
        crc32=crc32_of(path),
        crc32_bad=zlib.crc32(lines),
    )
    replace_plain(folder / f"{key}.done", msgspec.json.encode(result).decode())
    found: dict[str, Any] = msgspec.to_builtins(result)
    return found
