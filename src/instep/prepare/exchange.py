"""Puts samples into another order that no memory could hold: shuffled, or together by a key.

Each sample has a number of 63 bits: drawn from its place, or hashed from its key. A first task for
each file of samples sorts it by that number; a second for each range of numbers merges its part of
all of them. So every sample is written twice, and a process holds one range at a time. Ties keep
the order of the sources. Way in: `Exchange`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from instep.data.order import keys
from instep.data.shards.columns import Column
from instep.data.shards.encode import Encoded, encode
from instep.data.shards.views import (
    Array,
    View,
    based,
    batch_of,
    bytes_of,
    from_numpy,
    views_of,
)
from instep.data.shards.writer import BATCH_BYTES, ShardFile, ShardWriter
from instep.errors import DataError, InstepError
from instep.plain_file import beside_of, crc32_of, read_plain, replace_plain
from instep.prepare.asked import Asked
from instep.prepare.function import Bad, reducer_of, several
from instep.prepare.messages import Merge, Sort
from instep.prepare.results import Noted, wide_parts, write

MOST_BYTES = 1 << 30
"""Of the samples of one key: they are in memory together."""

_OF_SHUFFLE = 62


BITS = 63
"""Of the numbers."""


def hashed(view: View) -> Array:
    """The numbers of keys, [rows] uint64: equal where keys are."""
    found, view = np.empty(view.rows, np.uint64), _as_key(view)
    for row in range(view.rows):
        digest = hashlib.blake2b(view.row(row).tobytes(), digest_size=8).digest()
        found[row] = int.from_bytes(digest, "little") >> 1
    return found


def is_sorted(folder: Path, key: str) -> bool:
    """Whether a result has been sorted, and the files of it are as they were written."""
    to = folder / f"{key}.sorted"
    with suppress(OSError):
        return read_plain(to.with_suffix(".sums")).decode() == _sums(to)
    return False


def _sums(to: Path) -> str:
    return f"{crc32_of(to):08x} {crc32_of(to.with_suffix('.npy')):08x}"


def _as_key(view: View) -> View:
    """Values of which equal ones have equal bytes: there are two zeros of floats."""
    return View(view.data + 0.0) if view.data.dtype.kind == "f" else view


class Exchange:
    """The tasks of it.

    Args:
        asked: the seed, or the key and the function for the samples of one.
        folder: of results.
    """

    def __init__(self, asked: Asked, folder: Path) -> None:
        self._asked, self._folder = asked, folder
        self._reduce = reducer_of(asked)
        if self._reduce is not None:
            self._reduce.copies = True  # all samples of a range wait for each other

    def sort(self, task: Sort) -> int:
        """Write the samples of a result sorted by number, and the numbers beside them."""
        columns = task.columns
        held = list(wide_parts(task.parts, columns))
        numbers = self._numbers(task, held)
        order = np.argsort(numbers, kind="stable")
        to = self._folder / f"{task.key}.sorted"
        with ShardWriter(to, columns) as writer:
            for views in taken(held, columns, order):
                writer.write(views)
            beside = beside_of(to.with_suffix(".npy"))
            with open(beside, "wb") as file:
                np.save(file, numbers[order])
            beside.replace(to.with_suffix(".npy"))
            writer.close()
        replace_plain(to.with_suffix(".sums"), _sums(to))
        return writer.bytes

    def _numbers(self, task: Sort, held: list[list[View]]) -> Array:
        if self._asked.key is None:
            return keys(
                self._asked.seed,
                _OF_SHUFFLE,
                task.task,
                np.arange(sum(part.samples for part in task.parts)),
            )
        at = [column.name for column in task.columns].index(self._asked.key)
        return np.concatenate([hashed(views[at]) for views in held])

    def merge(self, task: Merge) -> dict[str, Any]:
        """Write the samples of a range of numbers, or what the function makes of those of a key.

        Raises:
            DataError: they are more than a process may hold.
            RecipeError: the function raised something else than ValueError.
        """
        files = [self._folder / f"{key}.sorted" for key in task.sorted]
        held, order, numbers = merged(files, task.first, task.stop)
        if self._reduce is None:
            batches = (
                Encoded(task.columns, views, []) for views in taken(held, task.columns, order)
            )
            return write(self._folder, task.key, task.columns, batches, lambda: Noted(0, [], {}))
        samples, of, bad = self._reduced(task, held, order, numbers)
        found = encode(samples, task.made) if samples else Encoded([], [], [])
        bad += [{"where": of[number], "error": text} for number, text in found.misfits]
        if bad and self._asked.unreadable == "stop":
            raise DataError(
                f"{bad[0]['where']}: {bad[0]['error']}. To leave such keys out: --unreadable skip."
            )
        batches = (Encoded(found.columns, views, []) for views in in_batches(found))
        return write(self._folder, task.key, found.columns, batches, lambda: Noted(0, bad, {}))

    def _reduced(
        self, task: Merge, held: list[list[View]], order: Array, numbers: Array
    ) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
        """What the function makes of the samples of each key; the keys of it; keys that are bad."""
        assert self._reduce is not None, "only where samples are put together"
        at = [column.name for column in task.columns].index(str(self._asked.key))
        samples, of, bad = list[Any](), list[str](), list[dict[str, Any]]()
        for views in taken(held, task.columns, order, whole=True):
            for number, group in groups(views, task.columns, at, numbers):
                self._reduce.seed(0, number)
                given, name = list[Any](), group[0][str(self._asked.key)]
                try:
                    self._reduce.many([group], given)
                except InstepError as error:
                    raise type(error)(f"key {name!r}: {error}") from None
                if isinstance(given[0], Bad):
                    bad.append({"where": f"key {name!r}", "error": given[0].text})
                else:
                    made = several(given[0])
                    samples += made
                    of += [f"key {name!r}"] * len(made)
        return samples, of, bad


def in_batches(found: Encoded) -> Iterator[list[View]]:
    """The samples in batches of about `BATCH_BYTES`."""
    rows = found.views[0].rows if found.views else 0
    size = bytes_of(found.views)
    for first, stop in pairwise(_cuts(rows, size)):
        if stop > first:
            yield [based(view.between(first, stop)) for view in found.views]


def taken(
    held: list[list[View]], columns: Sequence[Column], order: Array, *, whole: bool = False
) -> Iterator[list[View]]:
    """Samples of several batches in another order, in batches of about `BATCH_BYTES`.

    Args:
        held: the batches.
        columns: of them.
        order: numbers of samples.
        whole: in one batch instead.
    """
    if not held:
        return
    table = pa.Table.from_batches([batch_of(columns, list(map(based, each))) for each in held])
    cuts = [0, len(order)] if whole else _cuts(len(order), table.nbytes)
    for first, stop in pairwise(cuts):
        for batch in table.take(from_numpy(order[first:stop])).combine_chunks().to_batches():
            yield views_of(batch, columns)


def _cuts(rows: int, size: int) -> list[int]:
    parts = max(1, -(-size // BATCH_BYTES))
    return [rows * at // parts for at in range(parts + 1)]


def merged(files: Sequence[Path], first: int, stop: int) -> tuple[list[list[View]], Array, Array]:
    """The samples of a range of numbers of all sorted files, their order, and their numbers.

    Args:
        files: in the order of sources.
        first, stop: the range of numbers.

    Returns:
        Batches of views; the order of their samples by number, ties in the order of sources; and
        the numbers in that order.

    Raises:
        DataError: they are more than a process may hold.
    """
    held, numbers, size = list[list[View]](), list[Array](), 0
    for path in files:
        own = np.load(path.with_suffix(".npy"), mmap_mode="r")
        begin = int(np.searchsorted(own, np.uint64(first)))
        end = int(np.searchsorted(own, np.uint64(stop)))
        if end > begin:
            parts = list(ShardFile(path).between(begin, end))
            size += sum(map(bytes_of, parts))
            if size > MOST_BYTES:
                raise DataError(
                    f"the samples of one key, or of few, have more than {MOST_BYTES >> 20} MiB. "
                    "Leave parts of them out in --map, or use a finer key."
                )
            held += parts
            numbers.append(np.asarray(own[begin:end]))
    whole = np.concatenate(numbers) if numbers else np.empty(0, np.uint64)
    order = np.argsort(whole, kind="stable")
    return held, order, whole[order]


def groups(
    views: Sequence[View], columns: Sequence[Column], at: int, numbers: Array
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The samples of each key, and its number.

    Args:
        views: of samples in the order of their numbers.
        columns: of them.
        at: which column is the key.
        numbers: of the samples.
    """
    held: dict[bytes, list[dict[str, Any]]] = {}  # keys of one number, hardly ever several
    before, key = -1, _as_key(views[at])
    for row, number in enumerate(numbers.tolist()):
        if number != before:
            for group in held.values():
                yield before, group
            held, before = {}, number
        sample = {c.name: plain(c, v.row(row)) for c, v in zip(columns, views, strict=True)}
        held.setdefault(key.row(row).tobytes(), []).append(sample)
    for group in held.values():
        yield before, group


def plain(column: Column, value: Any) -> Any:
    """A value as a function of the user's gets it: a number, an array, text or bytes."""
    if column.kind == "number":
        return value.item()
    if column.kind == "text":
        return value.tobytes().decode()
    return value.tobytes() if column.kind in ("bytes", "image") else value.copy()
