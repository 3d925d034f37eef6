"""An order in which each micro-batch of a step is drawn from one part of a dataset.

In each epoch the shards of a part follow each other in a keyed permutation, mixed within windows;
part follows part, always in the same sequence. This sequence is cut into lanes, one for each
micro-batch of a step. So a lane is in one part, or goes over to the next once in an epoch, and
the worker that has that part computes it without samples of others.

It is a function of (seed, epoch, positions), of shards and parts; where parts lie is not known
here. Way in: `PartsOrder`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from instep.data.order import Indices, key
from instep.data.shard_sizes import Lot
from instep.data.windowed import Lanes, Windowed
from instep.job.spec import JobSpec

_OF_PART = 17
"""The purpose of a key: the order within a part."""


class PartsOrder:
    """The order of every epoch of a dataset that stands in parts.

    Args:
        sizes: samples of each shard, in the order of the dataset, 0 or more.
        bounds: at which shards parts begin and end, as `cut.cut` gives them.
        window: places from which a step draws at a time, in all lanes together.
        seed: of the job.
        batch: positions of a step.
        lanes: micro-batches of a step, `batch` at most.
    """

    def __init__(
        self,
        sizes: Sequence[int] | Indices,
        bounds: Sequence[int],
        window: int,
        seed: int,
        *,
        batch: int = 1,
        lanes: int = 1,
    ) -> None:
        self.sizes: Indices = np.asarray(sizes, np.int64)
        """Samples of each shard."""
        self.bounds = list(bounds)
        """At which shards parts begin and end."""
        each = [int(self.sizes[first:stop].sum()) for first, stop in pairwise(self.bounds)]
        self.part_sizes: Indices = np.array(each, np.int64)
        """Samples of each part."""
        self.ends: Indices = np.cumsum(self.part_sizes)
        """Where each part ends, in the sequence and in the dataset."""
        self.samples = int(self.ends[-1])
        self.lanes = Lanes(self.samples, batch, lanes)
        self._window, self._seed = max(1, window // lanes), seed
        self._orders: dict[tuple[int, int], Windowed] = {}

    @classmethod
    def of_job(
        cls, job: JobSpec, sizes: Sequence[int] | Indices, bounds: Sequence[int]
    ) -> PartsOrder:
        """That of a job's training set."""
        commit = job.per_commit
        return cls(
            sizes,
            bounds,
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
    def lots(self) -> list[Lot]:
        """Places of the samples of each part."""
        cuts = pairwise(self.bounds)
        return [(np.arange(first, stop), self.sizes[first:stop]) for first, stop in cuts]

    @property
    def digest(self) -> int:
        """A checksum of shards and parts, 32 bits."""
        told = np.concatenate([self.bounds, self.sizes]).astype("<i8")
        return zlib.crc32(told.tobytes())

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch.

        Returns:
            [stop - first] int64. Over the whole epoch every sample of `0..samples-1` occurs once.
        """
        lanes, places = self._places(np.arange(first, stop, dtype=np.int64))
        parts = self._part_at(places)
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(parts) != 0)) + 1
        for run in np.split(np.arange(len(places)), breaks):
            if len(run):
                part, lane = int(parts[run[0]]), int(lanes[run[0]])
                begin = int(self.ends[part] - self.part_sizes[part])
                low = int(places[run[0]]) - begin
                places[run] = self._order(part, lane).indices(epoch, low, low + len(run)) + begin
        return places

    def parts_at(self, positions: Indices) -> Indices:
        """The part that each position draws from, in every epoch: [positions] int64."""
        return self._part_at(self._places(np.asarray(positions, np.int64))[1])

    def _order(self, part: int, lane: int) -> Windowed:
        """That within a part; each lane has one, as it keeps what it has just computed."""
        if (part, lane) not in self._orders:
            sizes = self.sizes[self.bounds[part] : self.bounds[part + 1]]
            own = key(self._seed, _OF_PART, part)
            self._orders[part, lane] = Windowed(sizes, self._window, own)
        return self._orders[part, lane]

    def _places(self, positions: Indices) -> tuple[Indices, Indices]:
        """The lane of each position, and where it is in the sequence of parts."""
        assert not len(positions) or (positions[0] >= 0 and positions[-1] < self.samples)
        lane, place = self.lanes.of(positions)
        return lane, place + np.array(self.lanes.begins, np.int64)[lane]

    def _part_at(self, places: Indices) -> Indices:
        return np.searchsorted(self.ends, places, side="right").astype(np.int64)
