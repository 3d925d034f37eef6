"""Lengths of the samples of a prepared folder, read without the samples.

Way in: `lengths_in`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from instep.data.order import Order, key
from instep.data.shards.columns import Column
from instep.report.figures.lengths import PartLengths
from instep.units import readable_count
from instep.words import plural

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards

MOST_LENGTHS, MOST_FILES = 20_000, 64
"""Samples of a folder whose lengths are drawn, and files in which they are."""

_OF_FILES, _OF_SAMPLES = 65, 66
"""Keys are drawn for these: which files and samples those are."""


def lengths_in(folder: Shards) -> tuple[list[PartLengths], str]:
    """Lengths of a keyed choice of samples of a folder, and which those are, in words.

    Only where each sample begins and ends is read, in files that are here.

    Raises:
        DataError: a file is damaged.
    """
    here = np.flatnonzero(np.unpackbits(np.frombuffer(folder.held, "u1"), bitorder="little"))
    ragged = [(at, each) for at, each in enumerate(folder.manifest.columns) if each.ragged]
    if not ragged or not len(here):
        return [], ""
    files = np.sort(
        here[Order(len(here), key(0, _OF_FILES)).indices(0, 0, min(len(here), MOST_FILES))]
    )
    ends = np.cumsum([folder.shard_sizes[file] for file in files.tolist()])
    count = min(int(ends[-1]), MOST_LENGTHS)
    chosen = np.sort(Order(int(ends[-1]), key(0, _OF_SAMPLES)).indices(0, 0, count))
    found: list[list[Any]] = [[] for _ in ragged]
    begin = 0
    for file, end in zip(files.tolist(), ends.tolist(), strict=True):
        rows = chosen[(chosen >= begin) & (chosen < end)] - begin
        begin = end
        _measure(folder, file, rows, [at for at, _ in ragged], found)
    of = f"of {plural(count, 'sample')}"
    if count < folder.manifest.samples:
        of += f" of {readable_count(folder.manifest.samples)}, chosen at random"
    named = zip(ragged, found, strict=True)
    return [PartLengths(_named(column), np.concatenate(each)) for (_, column), each in named], of


def _measure(
    folder: Shards, file: int, rows: Any, columns: list[int], found: list[list[Any]]
) -> None:
    """Take in the lengths of some rows of a file, column by column."""
    opened = folder.file(file)
    batches = np.searchsorted(opened.starts, rows, "right") - 1
    for batch in np.unique(batches).tolist():
        inside = rows[batches == batch] - opened.starts[batch]
        views = opened.views(batch)
        for at, each in zip(columns, found, strict=True):
            each.append(views[at].lengths[inside])


def _named(column: Column) -> str:
    return f"{column.name} (bytes)" if column.kind != "array" else column.name
