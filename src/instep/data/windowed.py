"""An order that goes through a dataset shard by shard, and mixes what stands within a window.

In each epoch the shards follow each other in a keyed permutation. This sequence is cut into lanes,
one for each micro-batch of a step, and each lane is mixed by a keyed permutation within windows of
consecutive places. So a worker that has the same micro-batches in each step goes through shards of
its own, and a batch draws from as many places of the dataset as it has micro-batches.

Like `order.py`, all of it is a function of (seed, epoch, positions) that the job fixes: nothing is
stored but the sizes of the shards, and where each begins in the newest epoch. It knows no datasets:
`shard_sizes.py` does. Way in: `Windowed`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from instep.data.order import Indices, Order, key
from instep.job.spec import JobSpec

_OF_SHARDS, _OF_WINDOW = 13, 14
"""What a key is drawn for: the sequence of the shards, the order within a window."""


class Windowed:
    """The order of every epoch of a dataset that stands in shards.

    Args:
        sizes: samples of each shard, in the order of the dataset, 0 or more; 1 or more together.
        window: places from which a step draws at a time, 1 or more. One that holds all samples
            makes every order as likely as another.
        seed: of the job.
        batch: positions of a step. Where some steps take another number, the order is as valid,
            and a worker's share in it is of more shards.
        lanes: micro-batches of a step, `batch` at most.
    """

    def __init__(
        self,
        sizes: Sequence[int] | Indices,
        window: int,
        seed: int,
        *,
        batch: int = 1,
        lanes: int = 1,
    ) -> None:
        self.sizes: Indices = np.asarray(sizes, np.int64)
        """Samples of each shard."""
        self.samples = int(self.sizes.sum())
        lanes = 1 if window >= self.samples else lanes
        self._lanes = Lanes(self.samples, batch, lanes)
        self._window, within = -(-window // lanes), key(seed, _OF_WINDOW)
        self._whole = [Order(self._window, within) for _ in range(lanes)]  # each has its cache
        self._last = [Order(size % self._window or 1, within) for size in self._lanes.sizes]
        self._shards = Order(len(self.sizes), key(seed, _OF_SHARDS))
        self._begins: Indices = np.cumsum(self.sizes) - self.sizes
        empty = np.empty(0, np.int64)
        self._sequence = (-1, empty, empty)  # an epoch; ends of its shards, from there to samples

    @classmethod
    def of_job(cls, job: JobSpec, sizes: Sequence[int] | Indices) -> Windowed:
        """That of a job's training set, which has shards of these sizes."""
        commit = job.per_commit
        return cls(
            sizes,
            job.data.window,
            job.seed,
            batch=commit.global_batch,
            lanes=commit.micro_batches,
        )

    @property
    def runs(self) -> list[list[int]]:
        """The sizes of the shards as [size, how many follow each other], for a log."""
        return [[size, len([*same])] for size, same in groupby(self.sizes.tolist())]

    @property
    def digest(self) -> int:
        """Of the shards, 32 bits."""
        return zlib.crc32(self.sizes.astype("<i8").tobytes())

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch.

        Returns:
            [stop - first] int64. Over the whole epoch every sample of `0..samples-1` occurs once.
        """
        assert 0 <= first <= stop <= self.samples, f"positions {first} to {stop}"
        lane, place = self._lanes.of(np.arange(first, stop, dtype=np.int64))
        for each in np.unique(lane).tolist():
            chosen = np.flatnonzero(lane == each)  # they follow each other in their lane
            low, high = int(place[chosen[0]]), int(place[chosen[-1]]) + 1
            place[chosen] = self._mixed(epoch, each, low, high)
        ends, shifts = self._laid_out(epoch)
        place += shifts[np.searchsorted(ends, place, side="right")]
        return place

    def _mixed(self, epoch: int, lane: int, first: int, stop: int) -> Indices:
        """What stands at places [first, stop) of a lane, as places in the sequence of shards."""
        begin, size, window = self._lanes.begins[lane], self._lanes.sizes[lane], self._window
        parts = []
        for number in range(first // window, (stop - 1) // window + 1):
            low = number * window
            order = (self._whole if low + window <= size else self._last)[lane]
            own = (epoch * self.samples + low) * len(self._whole) + lane  # of epoch, window, lane
            inner = max(first - low, 0), min(stop - low, order.samples)
            parts.append(order.indices(own, *inner) + (begin + low))
        return np.concatenate(parts)

    def _laid_out(self, epoch: int) -> tuple[Indices, Indices]:
        """Where each shard of an epoch ends in its sequence, and what leads on to its samples."""
        known, ends, shifts = self._sequence  # read once: threads may share an order
        if known != epoch:
            shards = self._shards.indices(epoch, 0, len(self.sizes))
            ends = np.cumsum(self.sizes[shards])
            shifts = self._begins[shards] - (ends - self.sizes[shards])
            self._sequence = (epoch, ends, shifts)
        return ends, shifts


class Lanes:
    """An epoch's positions, dealt to lanes as micro-batches of steps: `order.micro_batch`."""

    def __init__(self, samples: int, batch: int, lanes: int) -> None:
        self._samples, self._batch, self._lanes = samples, batch, lanes
        self._steps, rest = divmod(samples, batch)
        cuts = [self._steps * (batch * n // lanes) + rest * n // lanes for n in range(lanes + 1)]
        self.begins = cuts[:-1]
        """Where each lane begins, if one followed the other."""
        self.sizes = [stop - first for first, stop in pairwise(cuts)]
        """Positions of each in an epoch."""

    def of(self, positions: Indices) -> tuple[Indices, Indices]:
        """The lane of each position, and its place in it."""
        step, inner = np.divmod(positions, self._batch)
        size = np.minimum(self._samples - step * self._batch, self._batch)
        lane = ((inner + 1) * self._lanes - 1) // size
        begin = size * lane // self._lanes
        each = self._batch * (lane + 1) // self._lanes - self._batch * lane // self._lanes
        return lane, step * each + (inner - begin)
