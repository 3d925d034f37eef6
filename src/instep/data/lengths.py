"""An order in which samples of about one length make a batch, and the cuts that make the batches.

The positions of an epoch's order are cut into windows. Within a window the samples are sorted by
length and cut into batches of equal cost, which come in a keyed order; so neighbouring batches are
no more alike in length than any others. A batch is cut into micro-batches that take about as long
as each other: samples times the longest of them, to which the others are padded.

All of it is a function of (seed, epoch, positions) and of the lengths of a window. Nothing is
stored but where windows begin. It knows no datasets. Way in: `ByLength`.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from instep.data.order import CutPosition, Indices, Order, Position, key

_OF_BATCHES = 25
"""Purpose of a key: the order of the batches of a window."""
_KEPT = 4
"""Windows that are remembered."""
_STRETCHES = _EACH = 1024
"""Positions that are looked at to know how long samples are: so many stretches of so many."""

Lengths = Callable[[Indices], Indices]
"""How long samples are, [count] int64, by their indices."""


class Base(Protocol):
    """The order whose windows are sorted."""

    def indices(self, epoch: int, first: int, stop: int, /) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""


class _Window(NamedTuple):
    """Samples of a window of an epoch, in the order in which they come."""

    places: Indices
    """[samples]: from place in the window to place in the order below."""
    samples: Indices
    lengths: Indices
    ends: Indices
    """[batches]: where each batch ends in the window."""
    cuts: dict[int, tuple[int, ...]]
    """Where micro-batches begin, by batch, as far as somebody has asked."""


class ByLength:
    """The order of every epoch, and its steps: both an `AnyOrder` and a `StepSizes`.

    Args:
        base: the order whose windows are sorted.
        positions: of each epoch in it, 1 or more.
        lengths: of its samples.
        window: about so many samples are sorted with each other.
        seed: of the job.
        micro_batches: of each step.
        tokens: that a step has at most, on average over the steps; a sample has as many as it is
            long. Left out: steps have `batch` samples at most, and differ by one.
        batch: samples of a step where there are no `tokens`.
    """

    total: int | None
    """Positions of each epoch."""

    def __init__(
        self,
        base: Base,
        positions: int,
        lengths: Lengths,
        *,
        window: int,
        seed: int,
        micro_batches: int,
        tokens: int | None = None,
        batch: int = 1,
    ) -> None:
        self.samples, self.total = positions, positions
        self._base, self._lengths, self._parts = base, lengths, micro_batches
        self._tokens = tokens
        seen = self._looked_at()
        self.mean = float(seen.mean())
        """Length of a sample: of all, or of about a million evenly over the first epoch."""
        self.digest = zlib.crc32(np.append(seen, positions).astype("<i8").tobytes())
        """Hash of these lengths, 32 bits."""
        cost = float(self._costs(seen).mean())
        steps = -(-positions // batch) if tokens is None else int(-(-cost * positions // tokens))
        self.steps = max(1, min(positions, steps))
        windows = max(1, min(self.steps, positions // window))
        numbers = np.arange(windows + 1, dtype=np.int64)
        self.window = -(-positions // windows)
        """Samples of a window at most, but for those of a batch."""
        self._first_steps: Indices = numbers * self.steps // windows
        self._begins: Indices = self._first_steps * positions // self.steps
        self._order_of = {
            int(count): Order(int(count), key(seed, _OF_BATCHES))
            for count in np.unique(np.diff(self._first_steps))
        }
        self._known: dict[tuple[int, int], _Window] = {}  # replaced, as threads may share an order
        self.times = self._times if hasattr(base, "times") else None
        """How often each sample has been planned before in the epoch; None: each comes once."""

    def positions(self, epoch: int) -> int:
        """Positions of an epoch."""
        return self.samples

    def of(self, epoch: int, number: int) -> Position:
        """Range of a step, from 0, with its micro-batches."""
        window = bisect_right(self._first_steps, number) - 1
        found, begin = self._window(epoch, window), int(self._begins[window])
        batch = number - int(self._first_steps[window])
        first, stop = int(found.ends[batch - 1]) if batch else 0, int(found.ends[batch])
        if (cuts := found.cuts.get(batch)) is None:
            inner = equal_parts(found.lengths[first:stop].tolist(), self._parts)
            cuts = found.cuts[batch] = tuple(begin + first + each for each in inner)
        return CutPosition(epoch, begin + first, begin + stop, cuts)

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""
        parts = [
            window.samples[low:high] for _, window, low, high in self._within(epoch, first, stop)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def padding(self, epoch: int, window: int = 0) -> float:
        """Share of padding in the micro-batches of a window."""
        steps = range(int(self._first_steps[window]), int(self._first_steps[window + 1]))
        begin, lengths = int(self._begins[window]), self._window(epoch, window).lengths
        cost = 0
        for step in steps:
            for low, high in zip((cuts := self.of(epoch, step).cuts), cuts[1:], strict=False):
                cost += (high - low) * int(lengths[low - begin : high - begin].max(initial=0))
        return 1 - int(lengths.sum()) / cost

    def _times(self, epoch: int, first: int, stop: int) -> Indices:
        found = [np.empty(0, np.int64)]
        for number, window, low, high in self._within(epoch, first, stop):
            begin, end = int(self._begins[number]), int(self._begins[number + 1])
            times: Any = self._base
            found.append(times.times(epoch, begin, end)[window.places[low:high]])
        return np.concatenate(found)

    def _within(self, epoch: int, first: int, stop: int) -> list[tuple[int, _Window, int, int]]:
        """The windows of some positions: number, window, and the places in it."""
        assert 0 <= first <= stop <= self.samples, f"positions {first} to {stop}"
        found, number = [], bisect_right(self._begins, first) - 1
        while first < stop:
            begin, end = int(self._begins[number]), int(self._begins[number + 1])
            high = min(stop, end)
            found.append((number, self._window(epoch, number), first - begin, high - begin))
            first, number = high, number + 1
        return found

    def _window(self, epoch: int, number: int) -> _Window:
        if (found := self._known.get((epoch, number))) is None:
            found = self._laid_out(epoch, number)
            newest = [*self._known.items()][1 - _KEPT :]
            self._known = {**dict(newest), (epoch, number): found}
        return found

    def _laid_out(self, epoch: int, number: int) -> _Window:
        samples = self._base.indices(
            epoch, int(self._begins[number]), int(self._begins[number + 1])
        )
        lengths = np.maximum(self._lengths(samples), 1)
        rank = np.argsort(lengths, kind="stable")  # equal ones stay in their keyed order
        count = int(self._first_steps[number + 1] - self._first_steps[number])
        ends = evenly_cut(self._costs(lengths[rank]), count)
        begins = np.append(0, ends[:-1])
        own = epoch * (len(self._begins) - 1) + number
        comes = self._order_of[count].indices(own, 0, count)
        sizes = (ends - begins)[comes]
        laid = np.cumsum(sizes)
        places = rank[np.repeat(begins[comes] - (laid - sizes), sizes) + np.arange(len(rank))]
        return _Window(places, samples[places], lengths[places], laid, {})

    def _costs(self, lengths: Indices) -> Indices:
        """Shares of a step that samples take up; one that is longer than a step takes up one."""
        if self._tokens is None:
            return np.ones(len(lengths), np.int64)
        return np.minimum(lengths, self._tokens)

    def _looked_at(self) -> Indices:
        """Lengths at positions evenly over the first epoch; of all, where they are few."""
        if self.samples <= _STRETCHES * _EACH:
            indices = self._base.indices(0, 0, self.samples)
        else:
            begins = np.arange(_STRETCHES) * (self.samples - _EACH) // (_STRETCHES - 1)
            parts = [self._base.indices(0, n, n + _EACH) for n in begins.tolist()]
            indices = np.concatenate(parts)
        return np.maximum(self._lengths(indices), 1)


def evenly_cut(costs: Indices, parts: int) -> Indices:
    """Where so many parts of about equal cost end, [parts]; each has one or more.

    Args:
        costs: of things in their order, `parts` or more; whole numbers, 1 or more.
        parts: 1 or more.
    """
    ends = np.cumsum(costs)
    numbers = np.arange(1, parts + 1)
    middles = (2 * ends - costs) * parts  # a thing goes where its middle is
    found = np.searchsorted(middles, 2 * int(ends[-1]) * numbers)
    found = np.maximum.accumulate(np.maximum(found, numbers) - numbers) + numbers
    return np.minimum(found, len(costs) - parts + numbers).astype(np.int64)


def equal_parts(lengths: Sequence[int], parts: int) -> list[int]:
    """Cut a batch so that the dearest part is as cheap as can be: where parts begin, and the end.

    A part costs its samples times the longest of them. Where there are as many samples as parts,
    none is empty.

    Args:
        lengths: of the samples, ascending, 1 or more.
        parts: 1 or more.
    """
    count = len(lengths)
    if count <= parts:
        return [count * number // parts for number in range(parts + 1)]
    low = max(lengths[-1], -(-sum(lengths) // parts))
    high = lengths[-1] * -(-count // parts)
    while low < high:
        most = (low + high) // 2
        if len(_cut_at(lengths, most, parts)) <= parts:
            high = most
        else:
            low = most + 1
    begins = _cut_at(lengths, high, parts)
    begins = [0] * (parts - len(begins)) + begins[::-1]
    return [*(max(each, number) for number, each in enumerate(begins)), count]


def _cut_at(lengths: Sequence[int], most: int, parts: int) -> list[int]:
    """Where parts of this cost at most begin, from the last on: `parts` of them, or one more."""
    found, stop = list[int](), len(lengths)
    while stop and len(found) <= parts:
        stop = max(0, stop - most // lengths[stop - 1])
        found.append(stop)
    return found
