"""Rows of record batches as a map-style dataset: samples are dicts of tensors, text and bytes.

Samples that are read together are gathered column by column, and each is a view of what was
gathered: it may be changed. Which files there are is not known here. Way in: `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from instep.data.shards.columns import Column
from instep.data.shards.values import image_of, tensor_of
from instep.data.shards.views import Array, View
from instep.errors import DataError, near_miss

MANY = 32
"""Files: if a read has rows of more, it has few of each."""


class File(Protocol):
    """Some rows, in record batches."""

    starts: Array
    """[batches + 1]: the first row of each batch."""

    def views(self, number: int) -> list[View]:
        """Look at the columns of one record batch."""


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of some files, in their order.

    Args:
        name: of the whole, for messages.
        known: the columns of every file.
        sizes: rows of each file.
        columns: names of those that samples are to have; None for all.
        transform: called with each sample, a dict; gives what the dataset returns.

    Raises:
        DataError: there is no such column.
    """

    def __init__(
        self,
        name: str,
        known: Sequence[Column],
        sizes: Sequence[int],
        columns: Sequence[str] | None,
        transform: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self.name, self.transform = name, transform
        self._known = {column.name: number for number, column in enumerate(known)}
        self._all = list(known)
        for each in columns or ():
            self._number(each)
        self.columns: list[str] = list(self._known if columns is None else columns)
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)

    def file(self, number: int) -> File:
        """Open one of the files.

        Raises:
            DataError: it is missing or damaged.
        """
        raise NotImplementedError

    def elsewhere(
        self, number: int, rows: Array | None, columns: Sequence[int]
    ) -> list[View] | None:
        """Rows of a file that is on another host, in views by number of the column; None if it is
        here.

        Args:
            number: of the file.
            rows: [n] int64; None for all.
            columns: numbers of those that are wanted; other views may hold anything.
        """
        return None

    def copied(
        self, number: int, rows: Array, columns: Sequence[int], files: int
    ) -> list[View] | None:
        """Rows of one of many files that a read has few of, in memory of their own; None where they
        may as well be read where they lie.

        Args:
            number, rows, columns: as for `elsewhere`.
            files: of which the read has rows.
        """
        return None

    def _number(self, name: str) -> int:
        if name not in self._known:
            raise DataError(f"{self.name} has no column {name!r}. {near_miss(name, self._known)}")
        return self._known[name]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples at once.

        Raises:
            IndexError: there is no such sample.
            DataError: a file is missing or damaged.
        """
        wanted, count = np.asarray(indices, np.int64), len(self)
        wanted = np.where(wanted < 0, wanted + count, wanted)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= count):
            bad = next(i for i in indices if not -count <= i < count)
            raise IndexError(f"sample {bad} of {count}")
        samples = self._samples(self._rows(wanted))
        return samples if self.transform is None else [self.transform(s) for s in samples]

    def _rows(self, wanted: Array) -> Array:
        """Find the rows of samples."""
        return wanted

    def _samples(self, rows: Array) -> list[dict[str, Any]]:
        places = list(self._places(rows))
        gathered = {
            name: _gathered(self._all[at], places, at, len(rows))
            for name, at in self._known.items()
            if name in set(self.columns)
        }
        return [{name: gathered[name][row] for name in self.columns} for row in range(len(rows))]

    def column(self, name: str) -> Array | list[str]:
        """Read one column of all samples, without reading the others.

        Returns:
            [samples] of numbers as they are stored, or [samples, ...] of arrays; a list of text.
            Times are datetime64 in microseconds.

        Raises:
            DataError: there is no such column, or its samples differ in length.
        """
        at = self._number(name)
        column = self._all[at]
        if column.kind == "text":
            return [text for part in self._parts(at) for text in _texts(part)]
        if column.ragged:
            raise DataError(
                f"column {name!r} of {self.name} is {column}: samples differ in length."
            )
        parts = [part.data for part in self._parts(at)]
        empty = np.empty((0, *column.row_shape), column.element)
        found = np.concatenate(parts) if parts else empty
        return found.view("datetime64[us]") if column.is_time else found

    def labels_in(self, name: str) -> Callable[[Array], Array] | None:
        """Make what looks up the labels of samples in a column of whole numbers, from their
        indices; None for another column.

        Raises:
            DataError: there is no such column.
        """
        column = self._all[self._number(name)]
        whole = column.kind == "number" and column.element.kind in "iu" and not column.is_time
        return self.lengths_in(name) if whole else None

    def lengths_in(self, name: str) -> Callable[[Array], Array]:
        """Make what looks up how long samples are by a column, from their indices: the number in
        it, or how many elements or bytes they have of it. Nothing else is read.

        Raises:
            DataError: there is no such column, or all samples have as much of it.
        """
        at = self._number(name)
        column = self._all[at]
        if column.ragged or column.kind == "number":
            return partial(self._lengths, at)
        raise DataError(
            f"column {name!r} of {self.name} is {column}: all samples have as much of it."
        )

    def _lengths(self, at: int, wanted: Array) -> Array:
        number = self._all[at].kind == "number"
        found = np.empty(len(wanted), self._all[at].element if number else np.int64)
        for mine, views, rows in self._places(self._rows(wanted), [at]):
            offsets = views[at].offsets
            found[mine] = (
                views[at].data[rows] if offsets is None else offsets[rows + 1] - offsets[rows]
            )
        return found

    def _parts(self, at: int) -> Iterator[View]:
        for number in range(len(self._starts) - 1):
            if (views := self.elsewhere(number, None, [at])) is not None:
                yield views[at]
                continue
            file = self.file(number)
            for batch in range(len(file.starts) - 1):
                yield file.views(batch)[at]

    def _places(
        self, wanted: Array, chosen: Sequence[int] = ()
    ) -> Iterator[tuple[Array, list[View], Array]]:
        """Find where rows lie: per record batch which of `wanted`, its views, rows in it; of these
        columns, or those that samples are to have."""
        files = np.searchsorted(self._starts, wanted, "right") - 1
        chosen = chosen or [self._known[name] for name in dict.fromkeys(self.columns)]
        numbers = np.unique(files).tolist()
        for number in numbers:
            mine = np.flatnonzero(files == number)
            rows = wanted[mine] - self._starts[number]
            views = self.elsewhere(number, rows, chosen)
            if views is None and len(numbers) > MANY:
                views = self.copied(number, rows, chosen, len(numbers))
            if views is not None:
                yield mine, views, np.arange(len(rows))
                continue
            file = self.file(number)
            batches = np.searchsorted(file.starts, rows, "right") - 1
            for batch in np.unique(batches).tolist():
                here = batches == batch
                yield mine[here], file.views(batch), rows[here] - file.starts[batch]


def _gathered(
    column: Column, places: list[tuple[Array, list[View], Array]], at: int, count: int
) -> Any:
    """Gather the values of a column for `count` samples, to be indexed by sample."""
    if not column.ragged:
        values = np.empty((count, *column.shape), column.element)
        for mine, views, rows in places:
            values[mine] = views[at].data[rows]
        return tensor_of(values)
    found: list[Any] = [None] * count
    for mine, views, rows in places:
        view = views[at]
        for place, row in zip(mine.tolist(), rows.tolist(), strict=True):
            found[place] = _value(column, view.row(row))
    return found


def _value(column: Column, value: Array) -> Any:
    if column.kind == "text":
        return value.tobytes().decode()
    if column.kind == "bytes":
        return value.tobytes()
    if column.kind == "image":
        return image_of(value.tobytes())
    return tensor_of(value.copy())


def _texts(view: View) -> list[str]:
    data, bounds = view.data.tobytes(), (view.offsets.tolist() if view.offsets is not None else [])
    return [data[a:b].decode() for a, b in pairwise(bounds)]
