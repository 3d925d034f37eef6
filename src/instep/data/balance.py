"""Orders in which classes come as often as planned: derived position by position, like all orders.

Within a class the samples stand in a keyed circle, and each epoch takes the next stretch of it. A
stretch of any length has each sample of the circle as often as another, or once less; so a sample
is taken the floor or the ceiling of its share of the class, in one epoch and over any number of
them. How many positions an epoch gives each class is a whole number, planned once.

It knows no datasets and no labels, only which samples are of each class. Ways in: `Members`,
`ClassOrder`, `InProportion`, `Wished`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.data.class_codes import CountedCodes
from instep.data.order import BLOCK, Indices, Order, key, keys

_OF_CIRCLE, _OF_SEQUENCE, _OF_OFFSET, _OF_PHASE = 21, 22, 23, 24
"""Purposes of keys."""

BETA = 0.999
"""Parameter of the effective number of samples (Cui et al. 2019, arXiv:1901.05555)."""

_ROW, _ROWS, _AT_ONCE = 64, 1 << 18, 1 << 14
"""Samples of a row of `Wished` at least, rows at most, and samples that are counted at once."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]

_NONE: tuple[Indices, Indices] = (np.empty(0, np.int64), np.empty(0, np.int64))


class Members:
    """The samples of each class.

    Args:
        codes: [samples], the class of each sample, from 0; every class has one or more. Or what
            looks them up.
    """

    def __init__(self, codes: Indices | CountedCodes) -> None:
        self._codes = codes if isinstance(codes, CountedCodes) else CountedCodes.of_array(codes)
        self.samples = self._codes.samples
        self.counts = self._codes.counts
        """Samples of each class."""
        self._circles: dict[tuple[int, int], Order] = {}

    def at(self, classes: Indices, places: Indices, seed: int, epoch: int = 0) -> Indices:
        """The samples at places of the circles of their classes: [count] int64.

        Args:
            classes: [count].
            places: [count], from 0, and below the samples of the class.
            seed: of the circles.
            epoch: the circles of another are others.
        """
        found = np.empty(len(classes), np.int64)
        for each in np.unique(classes).tolist():
            chosen = np.flatnonzero(classes == each)
            own = places[chosen]
            place = self._circle(each, seed).of(epoch, own)
            found[chosen] = self._find(each, place)
        return found

    def _find(self, each: int, places: Indices) -> Indices:
        """Samples of a class by their places among those of it."""
        return self._codes.find(each, places)

    def _circle(self, each: int, seed: int) -> Order:
        if (circle := self._circles.get((each, seed))) is None:
            circle = Order(int(self.counts[each]), key(seed, _OF_CIRCLE, each))
            self._circles = {**self._circles, (each, seed): circle}  # threads may share it
        return circle


def class_weights(counts: Indices, how: str) -> Numbers:
    """How much one sample of each class counts, [classes]; the mean over all samples is 1.

    Args:
        counts: samples of each class, 1 or more.
        how: `inverse`: all classes count the same; `effective`: by the inverse of the effective
            number of samples, which grows slower than their number.
    """
    size = counts.astype(np.float64)
    effective = -np.expm1(size * np.log(BETA)) / (1 - BETA)  # (1 - beta**n) / (1 - beta)
    weights = 1 / (effective if how == "effective" else size)
    mean: Numbers = weights * (size.sum() / (weights * size).sum())
    return mean


def planned_counts(counts: Indices, how: str) -> Indices:
    """Positions of each class in an epoch, [classes] int64: no sample comes less than once.

    The largest class has each of its samples once, and each other class as many positions as its
    weights want beside it, rounded.
    """
    weights = class_weights(counts, how)
    wanted = weights / weights.min() * counts
    planned: Indices = np.maximum(counts, np.rint(wanted).astype(np.int64))
    return planned


class ClassOrder:
    """Classes in planned numbers, in a keyed order.

    Args:
        members: samples of each class.
        planned: positions of each class in an epoch, 0 or more.
        seed: of the job.
    """

    def __init__(self, members: Members, planned: Indices, seed: int) -> None:
        self.members, self.planned = members, planned
        self.samples = int(planned.sum())
        self._ends = np.cumsum(planned)
        self._seed, self._sequence = seed, Order(self.samples, key(seed, _OF_SEQUENCE))

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""
        classes, place = self._places(epoch, first, stop)
        begun = np.array(
            [epoch * int(n) % int(size) for n, size in self._sizes()], np.int64
        )  # where the stretch of an epoch begins
        place = (begun[classes] + place) % self.members.counts[classes]
        return self.members.at(classes, place, self._seed)

    def times(self, epoch: int, first: int, stop: int) -> Indices:
        """How often each of them has been planned before in the epoch."""
        classes, place = self._places(epoch, first, stop)
        return place // self.members.counts[classes]

    def _sizes(self) -> zip[tuple[Any, Any]]:
        return zip(self.planned, self.members.counts, strict=True)

    def _places(self, epoch: int, first: int, stop: int) -> tuple[Indices, Indices]:
        """The class of each position, and the place in the epoch's stretch of it."""
        slots = self._sequence.indices(epoch, first, stop)
        classes = np.searchsorted(self._ends, slots, side="right")
        return classes, slots - (self._ends - self.planned)[classes]


class InProportion:
    """Each sample once, with the classes in proportion in every stretch of an epoch.

    The samples of a class are spread evenly over the epoch, from a keyed offset on, in a keyed
    order of their own in each epoch.

    Args:
        members: samples of each class.
        seed: of the job.
    """

    def __init__(self, members: Members, seed: int) -> None:
        self.members, self.samples, self._seed = members, members.samples, seed
        self._known = (-1, np.empty(0))  # an epoch, and the offset of each class

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""
        counts, offsets = self.members.counts, self._offsets(epoch)
        slack = 1.0 + len(counts)
        low = self._below(max(0.0, first - slack) / self.samples, offsets)
        high = self._below(min(self.samples * 1.0, stop + slack) / self.samples, offsets)
        if stop + slack >= self.samples:
            high = counts
        classes = np.repeat(np.arange(len(counts)), high - low)
        begins = np.cumsum(high - low) - (high - low)
        places = np.arange(len(classes)) - begins[classes] + low[classes]
        when = (places + offsets[classes]) / counts[classes]
        before = int(low.sum())
        chosen = np.lexsort((classes, when))[first - before : stop - before]
        assert len(chosen) == stop - first, f"positions {first} to {stop} of epoch {epoch}"
        return self.members.at(classes[chosen], places[chosen], self._seed, epoch)

    def _below(self, when: float, offsets: Numbers) -> Indices:
        """How many samples of each class stand before a moment of the epoch, from 0 to 1."""
        counts = self.members.counts
        return np.clip(np.ceil(when * counts - offsets), 0, counts).astype(np.int64)

    def _offsets(self, epoch: int) -> Numbers:
        known, offsets = self._known
        if known != epoch:
            drawn = keys(self._seed, _OF_OFFSET, epoch, np.arange(len(self.members.counts)))
            offsets = drawn / 2.0**63
            self._known = epoch, offsets
        return offsets


class _Rows(NamedTuple):
    """Positions of an epoch that the samples have, row by row."""

    ends: Indices
    """[rows + 1]: positions before each row of samples, and in all."""
    order: Order
    """Mixes the positions."""


class Wished:
    """Samples as often as each is wished: its floor or its ceiling, in one epoch and over any
    number of them. So epochs differ a little in their positions.

    Nothing is kept for a sample but what is given: a row of samples is counted again whenever one
    of them is looked for.

    Args:
        weights: [samples], 0 or more, some above: wishes, in proportion.
        seed: of the job.
        positions: that an epoch has on average. Left out, the sum of the weights, which then are
            how often each sample is to come in an epoch.
    """

    def __init__(
        self, weights: Sequence[float] | Numbers, seed: int, positions: int | None = None
    ) -> None:
        self._weights: Numbers = np.asarray(weights, np.float64)
        total = float(self._weights.sum())
        self._times = 1.0 if positions is None else positions / total
        self.samples, self._seed = max(1, round(total * self._times)), seed
        self.least = float(self._weights.min()) * self._times
        """The least wish."""
        self._size = max(_ROW, -(-len(self._weights) // _ROWS))
        self._known: dict[int, _Rows] = {}  # by epoch; replaced, as threads may share it
        self._newest: tuple[int, int, Indices, Indices] = (-1, -1, *_NONE)  # of `_block`

    def positions(self, epoch: int) -> int:
        """Positions of an epoch."""
        return int(self._rows(epoch).ends[-1])

    def fewest(self) -> int:
        """Positions that an epoch has at least: surely, or but for one epoch in a billion."""
        certain = variance = 0.0
        for first in range(0, len(self._weights), _AT_ONCE):
            wishes = self._weights[first : first + _AT_ONCE] * self._times
            whole = np.floor(wishes)
            certain += float(whole.sum())
            variance += float(((wishes - whole) * (1 - wishes + whole)).sum())
        return max(int(certain), int(self.samples - 6 * variance**0.5), 0)

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""
        return self._taken(epoch, first, stop)[0]

    def times(self, epoch: int, first: int, stop: int) -> Indices:
        """How often each of them has been planned before in the epoch."""
        return self._taken(epoch, first, stop)[1]

    def of_classes(self, codes: CountedCodes) -> Numbers:
        """Positions of an epoch that each class has on average, [classes]."""
        found, samples = np.zeros(len(codes.counts)), len(self._weights)
        for first in range(0, samples, _AT_ONCE):
            chosen = np.arange(first, min(first + _AT_ONCE, samples))
            found += np.bincount(codes.of(chosen), self._weights[chosen], len(found))
        own: Numbers = found * self._times
        return own

    def _taken(self, epoch: int, first: int, stop: int) -> tuple[Indices, Indices]:
        """Samples, and how often each was planned before."""
        parts = [_NONE]
        for number in range(first // BLOCK, -(-stop // BLOCK)):
            begin, block = number * BLOCK, self._block(epoch, number)
            within = slice(max(0, first - begin), stop - begin)
            parts.append((block[0][within], block[1][within]))
        samples, times = zip(*parts, strict=True)
        return np.concatenate(samples), np.concatenate(times)

    def _block(self, epoch: int, number: int) -> tuple[Indices, Indices]:
        """Samples and times of `BLOCK` positions, which are looked for together."""
        *known, samples, times = self._newest  # read once
        if known != [epoch, number]:
            rows = self._rows(epoch)
            stop = min((number + 1) * BLOCK, int(rows.ends[-1]))
            samples, times = self._found(epoch, rows.order.indices(epoch, number * BLOCK, stop))
            self._newest = epoch, number, samples, times
        return samples, times

    def _found(self, epoch: int, places: Indices) -> tuple[Indices, Indices]:
        """Samples by places in an epoch that is not mixed, and how often each came before."""
        before = self._rows(epoch).ends
        rows = np.unique(np.searchsorted(before, places, side="right") - 1)
        members = (rows[:, None] * self._size + np.arange(self._size)).ravel()
        there = members < len(self._weights)
        counts = np.zeros(len(members), np.int64)
        counts[there] = self._counts(epoch, members[there])
        ends = (counts.reshape(-1, self._size).cumsum(1) + before[rows, None]).ravel()
        found = np.searchsorted(ends, places, side="right")
        return members[found], places - ends[found] + counts[found]

    def _counts(self, epoch: int, samples: Indices) -> Indices:
        """Counts of samples in an epoch, [count] int64."""
        wishes = self._weights[samples] * self._times
        phases = keys(self._seed, _OF_PHASE, samples) / 2.0**63
        begun, ended = (np.floor(n * wishes + phases) for n in (epoch, epoch + 1))
        return (ended - begun).astype(np.int64)

    def _rows(self, epoch: int) -> _Rows:
        """Counts all samples of an epoch, some at a time."""
        if (found := self._known.get(epoch)) is None:
            samples, size = len(self._weights), self._size
            ends, together = np.zeros(1 - (-samples // size), np.int64), -(-_AT_ONCE // size)
            for row in range(0, len(ends) - 1, together):
                stop = min((row + together) * size, samples)
                counts = self._counts(epoch, np.arange(row * size, stop))
                sums = np.add.reduceat(counts, np.arange(0, len(counts), size))
                ends[row + 1 : row + 1 + len(sums)] = sums
            np.cumsum(ends, out=ends)
            order = Order(max(1, int(ends[-1])), key(self._seed, _OF_SEQUENCE))
            found = _Rows(ends, order)
            self._known = {**dict([*self._known.items()][-1:]), epoch: found}
        return found
