"""Writes the result of a task: its samples in a file, and what they are like beside them.

The file that says so is written last: a result counts once it is there. Way in: `write`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from instep.data.shards.columns import Column
from instep.data.shards.encode import Encoded
from instep.data.shards.statistics import Figures, take_batch
from instep.data.shards.writer import ShardWriter
from instep.plain_file import replace_plain
from instep.prepare.messages import Mapped, Segment


class Wider(Exception):
    """A sample needs wider columns than the file has: the task begins again with them."""

    def __init__(self, columns: list[Column]) -> None:
        super().__init__()
        self.columns = columns


def write(
    folder: Path,
    key: str,
    columns: list[Column],
    batches: Iterable[Encoded],
    counts: Callable[[Path], tuple[int, int]],
) -> dict[str, Any]:
    """Write the samples of a task, and its result.

    Args:
        folder: of results.
        key: of the task.
        columns: of its samples.
        batches: the samples.
        counts: called once they are written: gives records and bad ones, which it may write.

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
    records, bad = counts(folder / f"{key}.bad")
    result = Mapped(
        key=key,
        samples=writer.samples,
        bytes=writer.bytes,
        records=records,
        bad=bad,
        columns=columns,
        figures=figures,
        parts=[Segment(str(path), 0, writer.samples)],
    )
    replace_plain(folder / f"{key}.done", msgspec.json.encode(result).decode())
    found: dict[str, Any] = msgspec.to_builtins(result)
    return found
