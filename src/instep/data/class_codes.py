"""The class of each sample, looked up where it lies, and counted block by block.

Where the samples of a class are follows from how many of it each block has, and from one block's
labels. So a set of any size is searched with a table of at most some megabytes, and nothing is kept
for each sample but what the labels are read from. It knows no datasets. Ways in:
`CountedCodes.of_array`, `CountedCodes.of_column`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from instep.data.order import Indices

_BLOCK = 1024
"""Samples of a block at least."""
_BLOCKS, _CELLS = 1 << 16, 1 << 22
"""Blocks at most, and numbers of the table."""
_SPAN = 1 << 16
"""Labels that lie within so many numbers are looked up in a list."""

Labels = np.ndarray[Any, Any]


class CountedCodes:
    """Classes of samples, numbered from 0, and where those of a class are.

    Args:
        read: codes of the samples [first, stop).
        look: codes of any samples.
        samples: in all.
        counts: [blocks, classes], of each class in each block.
        size: samples of a block; the last may have fewer.
    """

    def __init__(
        self,
        read: Callable[[int, int], Labels],
        look: Callable[[Indices], Labels],
        samples: int,
        counts: Indices,
        size: int,
    ) -> None:
        self.samples, self._read, self.of = samples, read, look
        self.counts: Indices = counts.sum(0)
        """Samples of each class."""
        self._size = size
        self._before = np.zeros((counts.shape[1], len(counts) + 1), np.int64)
        np.cumsum(counts.T, axis=1, out=self._before[:, 1:])

    @classmethod
    def of_array(cls, codes: Indices) -> CountedCodes:
        """Those of an array, [samples]; every class has one or more."""
        classes = int(codes.max()) + 1
        kept = codes.astype(np.min_scalar_type(classes - 1))
        size = _block(len(kept), classes)
        begins = range(0, len(kept), size)
        counts = [np.bincount(kept[n : n + size], minlength=classes) for n in begins]
        found = np.array(counts, np.int64)
        return cls(lambda a, b: kept[a:b], lambda i: kept[i], len(kept), found, size)

    @classmethod
    def of_column(
        cls, read: Callable[[Indices], Labels], samples: int
    ) -> tuple[CountedCodes, list[int]]:
        """Those of a column of whole numbers, each of which is a class, and their labels, in the
        order in which they appear. All of the column is read once.

        Args:
            read: labels of samples, by their indices.
            samples: in all, 1 or more.
        """
        numbered, size, rows = _Numbered(), _block(samples, 1), []
        for first in range(0, samples, size):
            codes = numbered.learn(read(np.arange(first, min(first + size, samples))))
            rows.append(np.bincount(codes, minlength=len(numbered.names)))
        classes = len(numbered.names)
        together = -(-_block(samples, classes) // size)  # blocks that become one, for many classes
        counts = np.zeros((-(-len(rows) // together), classes), np.int64)
        for number, row in enumerate(rows):
            counts[number // together, : len(row)] += row

        def between(first: int, stop: int) -> Labels:
            return numbered.codes(read(np.arange(first, stop)))

        def look(indices: Indices) -> Labels:
            return numbered.codes(read(indices))

        return cls(between, look, samples, counts, size * together), numbered.names

    def find(self, each: int, ranks: Indices) -> Indices:
        """Samples of a class by their place among those of it: [count] int64."""
        before = self._before[each]
        blocks = np.searchsorted(before, ranks, side="right") - 1
        found = np.empty(len(ranks), np.int64)
        for block in np.unique(blocks).tolist():
            first = block * self._size
            codes = self._read(first, min(first + self._size, self.samples))
            mine = np.flatnonzero(blocks == block)
            found[mine] = first + np.flatnonzero(codes == each)[ranks[mine] - before[block]]
        return found


class _Numbered:
    """Numbers of labels, in the order in which these appear."""

    def __init__(self) -> None:
        self.names: list[int] = []
        self._sorted = np.empty(0, np.int64)
        self._codes: Labels = np.empty(0, np.int64)  # of the sorted ones, or of all in their span
        self._listed = False

    def learn(self, labels: Labels) -> Labels:
        """The codes of labels, of which some may be new."""
        while True:
            known = self.codes(labels)
            if not len(new := np.flatnonzero(known < 0)):
                return known
            values, first = np.unique(labels[new], return_index=True)
            self.names += values[np.argsort(first)].tolist()
            rank = np.argsort(self.names)
            self._sorted = np.array(self.names)[rank]
            span = int(self._sorted[-1]) - int(self._sorted[0])
            self._listed, self._codes = span < _SPAN, rank
            if self._listed:
                self._codes = np.full(span + 1, -1, np.int64)
                self._codes[self._sorted - self._sorted[0]] = rank

    def codes(self, labels: Labels) -> Labels:
        """The codes of labels; -1 for one that is not known."""
        if not self.names:
            return np.full(len(labels), -1)
        if self._listed:
            low, high = self._sorted[0], self._sorted[-1]
            if len(labels) and labels.min() >= low and labels.max() <= high:
                found: Labels = self._codes[labels - low]
                return found
        places = np.minimum(np.searchsorted(self._sorted, labels), len(self._sorted) - 1)
        right = self._sorted[places] == labels
        codes = self._codes[self._sorted - self._sorted[0]] if self._listed else self._codes
        return np.where(right, codes[places], -1)


def _block(samples: int, classes: int) -> int:
    blocks = max(1, min(_BLOCKS, _CELLS // classes))
    return max(_BLOCK, -(-samples // blocks))
