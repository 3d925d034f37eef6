"""What the samples of some files are like: means, deviations, lengths, counts of classes.

Each task has the figures of its samples, and they are merged in the order of tasks, so that their
digits do not depend on how many workers there were (Chan, Golub and LeVeque 1979, "Updating
formulae and a pairwise algorithm"). Way in: `Figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from instep.data.shards.columns import Column
from instep.data.shards.views import Array, View

MOST_CLASSES = 1000
"""A column with more different values is not counted."""

_SPAN = 4096
"""Whole numbers that differ by less are counted by their place."""

_LONGEST = 256
"""A column that has longer text has no classes."""


class Moments(msgspec.Struct):
    """Count, mean, sum of squared differences from it, least and largest of some numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float | None = None
    largest: float | None = None

    def take(self, other: Moments) -> None:
        """Take in the moments of further numbers (Chan et al., equation 1.5)."""
        if not other.count:
            return
        both = self.count + other.count
        apart = other.mean - self.mean
        self.mean += apart * (other.count / both)
        self.squares += other.squares + apart * apart * (self.count * other.count / both)
        self.count = both
        self.least = _of_both(min, self.least, other.least)
        self.largest = _of_both(max, self.largest, other.largest)

    @property
    def deviation(self) -> float:
        """The standard deviation, of the population."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


def _of_both(
    choose: Callable[[float, float], float], one: float | None, other: float | None
) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)


def moments_of(numbers: Array) -> Moments:
    """The moments of numbers of any shape; NaN and infinities are left out."""
    values = numbers.reshape(-1).astype(np.float64, copy=False)
    if not len(values):
        return Moments()
    with np.errstate(invalid="ignore"):
        mean = float(values.mean())
    if not math.isfinite(mean):
        values = values[np.isfinite(values)]
        if not len(values):
            return Moments()
        mean = float(values.mean())
    apart = values - mean
    return Moments(
        len(values), mean, float(np.dot(apart, apart)), float(values.min()), float(values.max())
    )


class Figures(msgspec.Struct):
    """Of one column."""

    values: Moments = msgspec.field(default_factory=Moments)
    """Of numbers, or of all elements of arrays."""
    lengths: Moments = msgspec.field(default_factory=Moments)
    """Elements of each sample, where samples differ; bytes of text."""
    classes: dict[str, int] | None = msgspec.field(default_factory=dict)
    """How often each value of an integer, bool or text is there; None: too many."""

    def take(self, other: Figures) -> None:
        """Take in the figures of further samples."""
        self.values.take(other.values)
        self.lengths.take(other.lengths)
        if self.classes is None or other.classes is None:
            self.classes = None
            return
        for name, count in other.classes.items():
            self.classes[name] = self.classes.get(name, 0) + count
        if len(self.classes) > MOST_CLASSES:
            self.classes = None

    def as_table(self, column: Column) -> dict[str, Any]:
        """For the manifest: what makes sense for the column."""
        found: dict[str, Any] = {}
        if self.values.count:
            found |= {"mean": self.values.mean, "deviation": self.values.deviation}
            found |= {"least": self.values.least, "largest": self.values.largest}
        if self.lengths.count:
            lengths = self.lengths
            found["lengths"] = {"mean": lengths.mean, "deviation": lengths.deviation}
            found["lengths"] |= {"least": lengths.least, "largest": lengths.largest}
        if self.classes and (column.kind == "text" or column.element.kind in "biu"):
            found["classes"] = dict(sorted(self.classes.items()))
        return found


def take_batch(figures: Sequence[Figures], columns: Sequence[Column], views: list[View]) -> None:
    """Take a batch's samples into the figures of each column."""
    for own, column, view in zip(figures, columns, views, strict=True):
        if column.kind in ("number", "array"):
            own.values.take(moments_of(view.elements))
        if column.ragged:
            own.lengths.take(moments_of(view.lengths))
        counted = column.kind == "text" or (
            column.kind == "number" and column.element.kind in "biu"
        )
        if not counted:
            own.classes = None
        elif own.classes is not None:
            own.take(Figures(classes=_counts(view)))


def _counted(data: Array) -> tuple[Array, Array]:
    """The different values of whole numbers or bools, ascending, and how often each is there."""
    if data.dtype.kind in "iu" and len(data):
        least, most = int(data.min()), int(data.max())
        if most - least < _SPAN and most < 1 << 62:  # without sorting
            counts = np.bincount(data.astype(np.int64) - least)
            there = np.flatnonzero(counts)
            return there + least, counts[there]
    return np.unique(data, return_counts=True)


def _counts(view: View) -> dict[str, int] | None:
    if view.offsets is None:
        values, counts = _counted(view.data)
        if len(values) > MOST_CLASSES:
            return None
        return {str(value): int(count) for value, count in zip(values, counts, strict=True)}
    if len(view.lengths) and view.lengths.max() > _LONGEST:
        return None
    texts = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        view.rows,
        [None, pa.py_buffer(view.offsets), pa.py_buffer(np.ascontiguousarray(view.data))],
    )
    counts = pc.value_counts(texts)
    if len(counts) > MOST_CLASSES:
        return None
    return {each["values"].decode(errors="replace"): each["counts"] for each in counts.to_pylist()}
