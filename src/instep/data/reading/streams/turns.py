"""The order of a stream: its parts give samples in turn, each mixed within windows of its own.

Sample number `t` of an epoch comes from the next part that has not ended, so all parts are as far
as each other. Within a step the samples stand part by part; a micro-batch is then of one part, or
of a few neighbours, and a worker that has the same micro-batches in each step reads the same parts.
A part is cut into windows of consecutive samples, and each window is mixed by a keyed permutation.

All of it is a function of (seed, epoch, positions) and of how long each part is; nothing is stored.
It knows no datasets. Ways in: `StreamPlan`, `Turns`.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from instep.data.order import Indices, Order, key

_OF_WINDOW = 41
"""Purpose of a key: the order within a window of a part."""

READ_AHEAD = 16
"""Samples of a part that are read together where nothing is mixed."""


class PlaceInStream(NamedTuple):
    """A sample of a stream."""

    part: int
    epoch: int
    at: int
    """Samples of the part before it, in this epoch."""


class StreamPlan(NamedTuple):
    """How a job divides a stream."""

    parts: int
    window: int
    """Samples of a part that are read together, 1 or more."""
    mixed: bool
    """Whether they are mixed."""
    sizes: tuple[int, ...] | None
    """Samples of each part in an epoch; None where a part that ends begins again, for ever."""
    samples: int
    """Positions of an epoch."""
    source: int = 0
    """Which of the streams of a mixture it is."""
    sources: int = 1
    """How many there are."""

    @property
    def room(self) -> int:
        """Numbers that each part has in an epoch; some are of no sample."""
        return max(self.sizes) if self.sizes else -(-self.samples // self.parts) + self.window

    def numbers(self, part: int, epoch: int, counts: Indices) -> Indices:
        """Numbers of samples of a part, which no others have: [count] int64."""
        own = (epoch * self.room + counts) * self.parts + part
        return own * self.sources + self.source

    def number(self, part: int, epoch: int, count: int) -> int:
        """That of one sample."""
        return ((epoch * self.room + count) * self.parts + part) * self.sources + self.source

    def place(self, number: int) -> PlaceInStream:
        """The sample of a number."""
        rest, part = divmod(number // self.sources, self.parts)
        return PlaceInStream(part, *divmod(rest, self.room))

    def window_of(self, part: int, number: int) -> int:
        """How many samples a window of a part has, by its number in the epoch."""
        if self.sizes is None:
            return self.window
        return max(0, min(self.window, self.sizes[part] - number * self.window))


class Turns:
    """The order of every epoch of a stream.

    Args:
        plan: how the stream is divided.
        seed: of the job.
        batch: positions of a step. Where some steps take another number, the order is as valid, and
            a worker's micro-batches are of more parts.
    """

    def __init__(self, plan: StreamPlan, seed: int, batch: int) -> None:
        self.plan, self.samples = plan, plan.samples
        self._seed, self._batch = seed, batch
        self._sorted: Indices = np.sort(np.array(plan.sizes or (), np.int64))
        self._before = np.concatenate([[0], np.cumsum(self._sorted)])
        self._orders: dict[tuple[int, int], Order] = {}

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The numbers of the samples at positions [first, stop) of an epoch, [stop - first] int64.

        Over the whole epoch every sample of every part occurs once.
        """
        assert 0 <= first <= stop <= self.samples, f"positions {first} to {stop}"
        found = [np.empty(0, np.int64)]
        for step in range(first // self._batch, -(-stop // self._batch)):
            begin = step * self._batch
            end = min(begin + self._batch, self.samples)
            found += self.stretch(epoch, begin, end, max(first, begin), min(stop, end))
        return np.concatenate(found)

    @property
    def digest(self) -> int:
        """A checksum of the plan, 32 bits."""
        return zlib.crc32(repr(self.plan).encode())

    def taken(self, position: int) -> Indices:
        """How many samples of each part stand before a position of an epoch, [parts] int64."""
        parts, number = np.arange(self.plan.parts), position
        if self.plan.sizes is None:
            return position // parts.size + (parts < position % parts.size)
        sizes = np.array(self.plan.sizes, np.int64)
        # all parts have given `full` samples, those that are longer perhaps one more
        alive = len(sizes) - np.arange(len(sizes))
        ended = int(np.searchsorted(self._before[:-1] + alive * self._sorted, number, "right"))
        left = len(sizes) - ended
        full = (number - int(self._before[ended])) // left if left else int(self._sorted[-1])
        more = number - int(np.minimum(sizes, full).sum())
        longer = sizes > full
        return np.minimum(sizes, full) + (longer & (np.cumsum(longer) <= more))

    def stretch(self, epoch: int, begin: int, end: int, first: int, stop: int) -> list[Indices]:
        """Numbers at positions [first, stop) of what has [begin, end), part by part, as a step."""
        low, high = self.taken(begin), self.taken(end)
        ends = begin + np.cumsum(high - low)
        found = []
        for part in range(int(np.searchsorted(ends, first, "right")), self.plan.parts):
            start = int(ends[part] - (high[part] - low[part]))
            if start >= stop:
                break
            offset = int(low[part]) - start
            counts = self._mixed(
                epoch, part, max(first, start) + offset, min(stop, int(ends[part])) + offset
            )
            found.append(self.plan.numbers(part, epoch, counts))
        return found

    def _mixed(self, epoch: int, part: int, first: int, stop: int) -> Indices:
        """Which samples of a part stand at places [first, stop) of its sequence."""
        plan = self.plan
        if not plan.mixed or first >= stop:
            return np.arange(first, stop, dtype=np.int64)
        windows, found = plan.room // plan.window + 1, []
        for number in range(first // plan.window, -(-stop // plan.window)):
            begin, size = number * plan.window, plan.window_of(part, number)
            order = self._orders.setdefault(
                (part, size), Order(size, key(self._seed, _OF_WINDOW, part))
            )
            within = max(first - begin, 0), min(stop - begin, size)
            found.append(order.indices(epoch * windows + number, *within) + begin)
        return np.concatenate(found)
