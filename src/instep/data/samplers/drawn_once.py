"""Samples drawn by weight, none twice in an epoch: the law of torch's `multinomial`.

Each sample has a waiting time, exponential at the rate of its weight and keyed by epoch and sample.
An epoch has those that come first, in the order in which they come: so each draw takes one of the
samples that are left, in proportion to their weights (Efraimidis and Spirakis 2006, "Weighted
random sampling with a reservoir"). Unlike other orders this one is kept while its epoch lasts: 4
bytes a position. Way in: `DrawnOnce`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.order import Indices, Words, keys

MOST = 1 << 24
"""Samples that torch draws from at most."""

_OF_WAIT = 67
"""Purpose of a key."""

_AT_ONCE = 1 << 16
_TERMS = 11

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


class DrawnOnce:
    """An order in which each epoch is a draw without replacement.

    Args:
        weights: [samples] 0 or more, `MOST` samples at most.
        seed: of the job.
        positions: of an epoch, at most as many as there are weights above 0.
    """

    def __init__(self, weights: _Numbers, seed: int, positions: int) -> None:
        assert positions <= np.count_nonzero(weights) <= len(weights) <= MOST, f"{positions} draws"
        self._weights, self._seed, self.samples = weights, seed, positions
        self._drawn: dict[int, np.ndarray[Any, np.dtype[np.uint32]]] = {}
        # of the newest epochs; replaced, as threads may share it

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""
        if (drawn := self._drawn.get(epoch)) is None:
            drawn = self._draw(epoch)
            self._drawn = {**dict([*self._drawn.items()][-1:]), epoch: drawn}
        return drawn[first:stop].astype(np.int64)

    def _draw(self, epoch: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        waits = np.full(len(self._weights), np.inf)
        for first in range(0, len(waits), _AT_ONCE):
            within = slice(first, min(first + _AT_ONCE, len(waits)))
            weights, samples = self._weights[within], np.arange(within.start, within.stop)
            some = weights > 0
            waits[within][some] = waiting(keys(self._seed, _OF_WAIT, epoch, samples[some]))
            waits[within][some] /= weights[some]
        last = np.partition(waits, self.samples - 1)[self.samples - 1]
        chosen = np.flatnonzero(waits <= last)  # more than are wanted where some are equal
        order = np.argsort(waits[chosen], kind="stable")[: self.samples]
        return chosen[order].astype(np.uint32)


def waiting(words: Words) -> _Numbers:
    """Exponential draws of mean 1, [count]: minus the logarithm of keys of 63 bits.

    Sums and products alone, which round the same on every processor; `numpy.log` does not.
    """
    part, power = np.frexp((words + 0.5) * 2.0**-63)
    small = part < 0.5**0.5
    part, power = np.where(small, 2 * part, part), power - small
    ratio = (part - 1) / (part + 1)  # log(part) = 2 * atanh(ratio), of 0.172 at most
    square, found = ratio * ratio, np.zeros_like(ratio)
    for term in range(_TERMS - 1, -1, -1):
        found = found * square + 1 / (2 * term + 1)
    waits: _Numbers = -(2 * ratio * found + power * 0.6931471805599453)
    return waits
