"""Counted values of a column, as they are best shown: as classes, in bins, or not at all.

An identifier or a path is another one in each sample, a width or a time has many values that have
an order: bars of the most frequent of those say nothing. Way in: `CountedValues`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instep.data.shards.columns import Column
from instep.report.figures.lengths import Sizes, edges_of

FEW, OFTEN = 12, 10
"""So few values are always classes; more only if each is there so often, in the mean."""

_MOST = 1 << 53
"""Larger numbers are identifiers or hashes."""


class CountedValues(NamedTuple):
    """How often each value of a column is there."""

    column: Column
    counts: Mapping[str, int]

    @property
    def are_classes(self) -> bool:
        """Whether they are few, for so many samples; numbers of classes begin at 0 or 1."""
        if len(self.counts) <= FEW:
            return True
        few = len(self.counts) * OFTEN <= sum(self.counts.values())
        return few and (self.column.kind == "text" or min(map(int, self.counts)) in (-1, 0, 1))

    @property
    def hardly_repeat(self) -> bool:
        """Whether most are there once, as identifiers are."""
        return 2 * len(self.counts) > sum(self.counts.values())

    def bins(self, most: int) -> tuple[Sizes, Sizes] | None:
        """How many samples are in each bin, and the bins, as of `histogram_of`; None if they have
        no order, or are identifiers."""
        if self.column.kind == "text" or self.are_classes or self.hardly_repeat:
            return None
        numbers = sorted((int(name), count) for name, count in self.counts.items())
        if max(abs(numbers[0][0]), abs(numbers[-1][0])) >= _MOST:
            return None
        values, counts = np.array(numbers, np.int64).T
        edges = edges_of(int(values[0]), int(values[-1]), _median(values, counts), most)
        return np.histogram(values, edges, weights=counts)[0].astype(np.int64), edges


def _median(values: NDArray[np.int64], counts: NDArray[np.int64]) -> float:
    ends = np.cumsum(counts)
    return float(values[np.searchsorted(ends, ends[-1] / 2)])
