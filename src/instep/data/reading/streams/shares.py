"""The order of several streams that a job mixes in shares: `[[data.sources]]`.

Each stream has its own order (`Turns`), of which an epoch takes the next stretch; which stream a
position is of follows from the shares alone. Sample number `k` of a stream is due at the moment
`(k + offset) / share`, with an offset that is keyed by stream and epoch, and an epoch has all
samples in the order of these moments. So every stretch of it has each stream in proportion, to a
sample or two. Within a step the samples stand stream by stream, and part by part.

It knows no datasets. Ways in: `MixedPlan`, `MixedTurns`, `turns_of`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instep.data.balance import Numbers
from instep.data.order import Indices, key, keys
from instep.data.reading.streams.turns import PlaceInStream, StreamPlan, Turns
from instep.job.spec import JobSpec

_OF_STREAM, _OF_DUE = 44, 45
"""Purposes of keys: the seed of a stream; when its first sample is due."""


def seed_of(seed: int, source: int) -> int:
    """The seed by which one stream of a mixture is mixed, and draws."""
    return key(seed, _OF_STREAM, source)


class MixedPlan(NamedTuple):
    """How a job divides several streams, and mixes them."""

    streams: tuple[StreamPlan, ...]
    shares: tuple[float, ...]
    """Samples of each among those of all."""
    planned: tuple[int, ...] | None
    """Positions that an epoch has of each; None where all begin again, for ever."""
    samples: int
    """Positions of an epoch."""

    @property
    def parts(self) -> int:
        """Those of all streams."""
        return sum(each.parts for each in self.streams)

    @property
    def window(self) -> int:
        """Samples of a part that are read together, 1 or more."""
        return self.streams[0].window

    @property
    def mixed(self) -> bool:
        """Whether they are mixed."""
        return self.streams[0].mixed

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Samples of each part of each stream; None where a part that ends begins again."""
        sizes = [each.sizes for each in self.streams if each.sizes is not None]
        return tuple(n for each in sizes for n in each) if sizes else None

    def of(self, number: int) -> StreamPlan:
        """The stream that a sample is of."""
        return self.streams[number % len(self.streams)]

    def place(self, number: int) -> PlaceInStream:
        """The sample of a number, in its stream."""
        return self.of(number).place(number)


class MixedTurns:
    """The order of every epoch of a mixture of streams.

    Args:
        plan: how it is mixed.
        seed: of the job.
        batch: positions of a step.
    """

    def __init__(self, plan: MixedPlan, seed: int, batch: int) -> None:
        self.plan, self.samples = plan, plan.samples
        self._seed, self._batch = seed, batch
        self._turns = [
            Turns(each, seed_of(seed, number), batch) for number, each in enumerate(plan.streams)
        ]
        self._shares: Numbers = np.array(plan.shares, np.float64)
        self._most = np.array(plan.planned or [np.iinfo(np.int64).max] * len(self._shares))

    @property
    def digest(self) -> int:
        """A checksum of the plan, 32 bits."""
        return zlib.crc32(repr(self.plan).encode())

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The numbers of the samples at positions [first, stop) of an epoch, [stop - first] int64.

        An epoch has its planned positions of each stream, and over several of them each sample of a
        stream that is counted comes the floor or the ceiling of its mean.
        """
        assert 0 <= first <= stop <= self.samples, f"positions {first} to {stop}"
        found = [np.empty(0, np.int64)]
        for step in range(first // self._batch, -(-stop // self._batch)):
            at = step * self._batch
            end = min(at + self._batch, self.samples)
            for source, epoch_of, low, high in self._of_step(epoch, at, end):
                size = high - low
                if at < stop and at + size > first:
                    chosen = low + max(first - at, 0), low + min(stop - at, size)
                    found += self._turns[source].stretch(epoch_of, low, high, *chosen)
                at += size
        return np.concatenate(found)

    def taken(self, epoch: int, position: int) -> Indices:
        """How many samples of each stream stand before a position of an epoch, [streams] int64."""
        shares = self._shares
        drawn = keys(self._seed, _OF_DUE, epoch, np.arange(len(shares)))
        offsets = drawn / 2.0**63
        # all that is due clearly earlier, and then one by one
        clear = position - 2 * len(shares) - 2
        counts = np.clip(np.ceil(clear * shares - offsets), 0, self._most).astype(np.int64)
        for _ in range(position - int(counts.sum())):
            due = np.where(counts < self._most, (counts + offsets) / shares, np.inf)
            counts[np.argmin(due)] += 1
        return counts

    def _of_step(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(stream, epoch of it, first and last + 1 in that) of what a step has, in its order."""
        lows, highs = self.taken(epoch, begin), self.taken(epoch, end)
        for source, plan in enumerate(self.plan.streams):
            low, high = int(lows[source]), int(highs[source])
            if self.plan.planned is None:
                yield source, 0, low, high
                continue
            before = epoch * self.plan.planned[source]
            low, high = low + before, high + before
            while low < high:
                own, place = divmod(low, plan.samples)
                size = min(high - low, plan.samples - place)
                yield source, own, place, place + size
                low += size


AnyTurns = Turns | MixedTurns
"""The order of a stream, or of several."""


def turns_of(job: JobSpec, plan: StreamPlan | MixedPlan) -> AnyTurns:
    """The order of a job's stream, or of its mixture of streams."""
    kind = MixedTurns if isinstance(plan, MixedPlan) else Turns
    return kind(plan, job.seed, job.per_commit.global_batch)  # type: ignore[arg-type]
