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
from typing import Any

import numpy as np

from instep.data.class_codes import CountedCodes
from instep.data.order import Indices, Order, key, keys

_OF_CIRCLE, _OF_SEQUENCE, _OF_OFFSET, _OF_PHASE = 21, 22, 23, 24
"""Purposes of keys."""

BETA = 0.999
"""Parameter of the effective number of samples (Cui et al. 2019, arXiv:1901.05555)."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


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


class Wished:
    """Samples as often as each is wished: its floor or its ceiling, in one epoch and over any
    number of them. So epochs differ a little in their positions.

    Args:
        wishes: [samples], how often each is to come in an epoch, 0 or more.
        seed: of the job.
    """

    def __init__(self, wishes: Sequence[float] | Numbers, seed: int) -> None:
        self.wishes: Numbers = np.asarray(wishes, np.float64)
        self.samples, self._seed = max(1, round(float(self.wishes.sum()))), seed
        phases = keys(seed, _OF_PHASE, np.arange(len(self.wishes)))
        self._phases: Numbers = phases / 2.0**63
        self._known: tuple[int, Indices, Order] = (-1, np.empty(0, np.int64), Order(1, 0))

    def counts(self, epoch: int) -> Indices:
        """How often each sample comes in an epoch, [samples] int64."""
        begun = np.floor(epoch * self.wishes + self._phases)
        ended = np.floor((epoch + 1) * self.wishes + self._phases)
        return (ended - begun).astype(np.int64)

    def positions(self, epoch: int) -> int:
        """Positions of an epoch."""
        ends = self._laid_out(epoch)[0]
        return int(ends[-1])

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""
        ends, order = self._laid_out(epoch)
        return np.searchsorted(ends, order.indices(epoch, first, stop), side="right")

    def times(self, epoch: int, first: int, stop: int) -> Indices:
        """How often each of them has been planned before in the epoch."""
        ends, order = self._laid_out(epoch)
        slots = order.indices(epoch, first, stop)
        sample = np.searchsorted(ends, slots, side="right")
        return slots - np.where(sample > 0, ends[sample - 1], 0)

    def _laid_out(self, epoch: int) -> tuple[Indices, Order]:
        """Where the positions of each sample end, and the order of all."""
        known, ends, order = self._known  # read once: threads may share an order
        if known != epoch:
            ends = np.cumsum(self.counts(epoch))
            order = Order(max(1, int(ends[-1])), key(self._seed, _OF_SEQUENCE))
            self._known = epoch, ends, order
        return ends, order


def evenly(positions: int, steps: int) -> Indices:
    """Sizes of so many steps that differ by one at most: [steps] int64."""
    cuts = np.arange(steps + 1, dtype=np.int64) * positions // steps
    return np.diff(cuts)
