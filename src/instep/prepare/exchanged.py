"""The tasks that put samples into another order: each result sorted, then each range merged.

Way in: `exchanged`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from instep.data.shards.columns import Column, as_plain
from instep.errors import SpecError, near_miss
from instep.prepare.asked import Asked
from instep.prepare.assemble import columns_of
from instep.prepare.exchange import BITS, is_sorted
from instep.prepare.folder import Folder
from instep.prepare.messages import Mapped, Merge, Sort
from instep.prepare.progress import Progress
from instep.prepare.workers.crew import Crew


def exchanged(
    results: Sequence[Mapped],
    columns: list[Column],
    asked: Asked,
    folder: Folder,
    crew: Crew,
    say: Callable[[str], None],
) -> list[Mapped]:
    """The results of merged ranges, in their order.

    Args:
        results: of tasks, in the order of sources.
        columns: that hold the samples of all.
        asked: to shuffle, or the key and the function.
        folder: of results.
        crew: does the tasks.
        say: prints a line of progress.

    Raises:
        DataError: samples of one key are too many.
        SpecError: no column has that name.
    """
    _check(asked, columns)
    about = json.dumps([asked.exchanges(), repr(columns)])
    sorts = [
        Sort(number, _key(about, result.key, number), number, result.parts, columns)
        for number, result in enumerate(results)
        if result.samples
    ]
    left = [task for task in sorts if not is_sorted(folder.work, task.key)]
    progress = Progress("sorted", len(left), say)
    for _ in crew.do(left):
        progress.step()
    merges = list(_merges(sorts, results, columns, asked, about))
    if asked.reduce is None:
        return _merged(merges, folder, crew, say)
    first = list[Mapped]()
    while merges and not columns_of(first):  # which the function has decided with its first sample
        first += _merged([merges.pop(0)], folder, crew, say)
    made = columns_of(first)
    rest = [
        msgspec.structs.replace(task, key=_key(task.key, as_plain(made)), made=made)
        for task in merges
    ]
    return first + _merged(rest, folder, crew, say)


def _merged(
    tasks: Sequence[Merge], folder: Folder, crew: Crew, say: Callable[[str], None]
) -> list[Mapped]:
    """The results of ranges: those that are there, and what is done now."""
    found = folder.results(task.key for task in tasks)
    open_ = [task for task in tasks if task.key not in found]
    progress = Progress("merged", len(open_), say)
    for done in crew.do(open_):
        result = msgspec.convert(done.value, Mapped)
        found[result.key] = result
        progress.step()
    return [found[task.key] for task in tasks]


def _check(asked: Asked, columns: Sequence[Column]) -> None:
    if asked.key is None:
        return
    names = {column.name: column for column in columns}
    if asked.key not in names:
        raise SpecError(
            f"--key {asked.key!r}: no column has that name. {near_miss(asked.key, names)}"
        )
    if names[asked.key].kind not in ("number", "text", "bytes"):
        raise SpecError(
            f"--key {asked.key!r}: the column is {names[asked.key]}; wanted: a number or text."
        )


def _merges(
    sorts: Sequence[Sort],
    results: Sequence[Mapped],
    columns: list[Column],
    asked: Asked,
    about: str,
) -> Iterator[Merge]:
    size = sum(result.bytes for result in results)
    count = max(1, round(size / asked.shard_bytes))
    keys = [task.key for task in sorts]
    whole = _key(about, *keys)
    cuts = [(1 << BITS) * at // count for at in range(count + 1)]
    for number, (first, stop) in enumerate(pairwise(cuts)):
        yield Merge(number, _key(whole, number, count), keys, first, stop, columns)


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
