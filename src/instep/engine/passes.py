"""How a worker runs the micro-batches it was dealt: apart, or as one larger forward pass.

One larger pass is faster, and the same to rounding unless something in the
model sees the other samples of its batch (BatchNorm), draws random numbers
(dropout), or weighs samples unevenly in the loss. `sameness.py` finds out.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from instep.data.dealing import deal
from instep.data.loader import Slice
from instep.data.order import Position, micro_batch
from instep.data.participants import OwnRounds
from instep.data.parts.near import Held, deal_near
from instep.data.parts.order import PartsOrder
from instep.job.train import TrainSpec

OF_PASS = 1
"""What a key is drawn for, beside the draws of the data layer: one forward pass."""


class Pass(NamedTuple):
    """One forward and backward pass of a worker in a step."""

    samples: Slice
    number: int
    """Of its first micro-batch."""
    repeats: bool = False
    """Whether it is another worker's, computed a second time: then it counts nothing."""
    micro_batches: int = 1
    """In it."""

    @property
    def size(self) -> int:
        """Samples in it."""
        return self.samples.stop - self.samples.first


class Share(NamedTuple):
    """What one worker does in one step."""

    passes: list[Pass]
    first: int
    stop: int
    """Positions [first, stop) of the epoch's order, between which all of them are."""


def parts_of(position: Position, train: TrainSpec, whole: int = 0) -> int:
    """Micro-batches of the step at `position`, where a whole one has `train.global_batch` samples,
    or so many.

    A smaller last batch is cut into fewer, of about the same size: one of a
    single sample would be too little for a layer that looks at its batch.
    """
    if position.cuts:
        return len(position.cuts) - 1
    whole = whole or train.global_batch
    return -(-(position.stop - position.first) * train.micro_batches // whole)


def share_of(
    position: Position,
    micro_batches: int,
    workers: int,
    rank: int,
    *,
    merge: bool,
    speeds: Sequence[float] | None = None,
    whole: bool = False,
    shard: int = 1,
) -> Share:
    """The passes of one worker in the step at `position`, cut into `micro_batches`.

    Micro-batches without samples are left out; a worker may have no pass at all.
    Merged ones are one pass, or several where a worker is dealt more than an even
    share: none is larger than that, as memory may not hold it. Unless `whole`: then all are one.

    Where a replica is a mesh whose ranks split the samples, `workers` are replicas, and what is
    dealt are units of `shard` micro-batches that its ranks compute at once. The share is that of
    the replica, as if it were one worker; `part_of` says what each of its ranks has of a pass.
    """
    dealt = deal_units(micro_batches, workers, speeds and tuple(speeds), shard)[rank]
    parts = _passes_of(dealt, -(-micro_batches // (shard * workers)), merge, whole, shard)
    first, stop = positions_of(position, dealt, micro_batches)
    cuts = [positions_of(position, part, micro_batches) for part in parts]
    return Share(_passes(position, parts, cuts), first, stop)


def _passes(
    position: Position, parts: Sequence[range], cuts: Sequence[tuple[int, int]]
) -> list[Pass]:
    """Passes over micro-batches that have samples."""
    return [
        Pass(Slice(position.epoch, low, high), part.start, micro_batches=len(part))
        for part, (low, high) in zip(parts, cuts, strict=True)
        if high > low
    ]


@lru_cache(maxsize=64)  # the same in most steps of a run
def _passes_of(
    dealt: range, largest: int, merge: bool, whole: bool, shard: int
) -> tuple[range, ...]:
    """The micro-batches of each pass of a worker; units of `shard`, at most so many in a pass."""
    units = [dealt[n : n + shard] for n in range(0, len(dealt), shard)]
    if whole:
        return (dealt,) if dealt else ()
    if not merge or not dealt:
        return tuple(units)
    merged = deal(len(units), -(-len(units) // largest))
    return tuple(dealt[part.start * shard : part.stop * shard] for part in merged)


def part_of(position: Position, micro_batches: int, whole: Pass, shard: int, rank: int) -> Pass:
    """What one of the `shard` ranks that split a replica's samples has of a pass.

    All run their part at the same time. One that has no samples runs the pass's first sample, and
    counts nothing.
    """
    mine = deal(whole.micro_batches, shard)[rank]
    part = range(whole.number + mine.start, whole.number + mine.stop)
    low, high = positions_of(position, part, micro_batches)
    if low < high:
        return Pass(whole.samples._replace(first=low, stop=high), part.start, False, len(part))
    first = whole.samples.first
    samples = whole.samples._replace(first=first, stop=first + 1)
    return Pass(samples, whole.number, repeats=True)


def share_of_these(
    position: Position, micro_batches: int, numbers: Sequence[int], most: int = 1
) -> Share:
    """The passes of a worker that has just these, in their order; each apart, or at most so many
    that follow each other as one."""
    parts = [
        stretch[at : at + most]
        for stretch in stretches(numbers)
        for at in range(0, len(stretch), most)
    ]
    cuts = [positions_of(position, part, micro_batches) for part in parts]
    first, stop = (cuts[0][0], cuts[-1][1]) if cuts else (position.stop, position.stop)
    return Share(_passes(position, parts, cuts), first, stop)


def stretches(numbers: Sequence[int]) -> list[range]:
    """Numbers in ascending order, as ranges of those that follow each other."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def share_of_own(position: Position, parts: Sequence[Position], numbers: Sequence[int]) -> Share:
    """The passes of a worker that has these participants, each with data of its own."""
    passes = [Pass(Slice(*parts[number]), number) for number in numbers]
    return Share(passes, position.first, position.stop)


@lru_cache(maxsize=64)  # the same in most steps of a run
def deal_units(
    micro_batches: int, workers: int, speeds: tuple[float, ...] | None = None, shard: int = 1
) -> tuple[range, ...]:
    """The micro-batches of each worker, where `shard` are dealt as one; the last may be fewer."""
    dealt = deal(-(-micro_batches // shard), workers, speeds)
    every = range(micro_batches)
    return tuple(every[part.start * shard : part.stop * shard] for part in dealt)


def ranges_of(
    position: Position,
    micro_batches: int,
    workers: int,
    speeds: Sequence[float] | None = None,
    shard: int = 1,
) -> list[tuple[int, int]]:
    """Positions [first, stop) of each worker in the step at `position`; some may be empty."""
    dealt = deal_units(micro_batches, workers, speeds and tuple(speeds), shard)
    return [positions_of(position, part, micro_batches) for part in dealt]


def positions_of(position: Position, part: range, micro_batches: int) -> tuple[int, int]:
    """Where the micro-batches of `part` stand: from the begin of its first to that of the next."""
    if position.cuts:
        return position.cuts[part.start], position.cuts[part.stop]
    begin, _ = micro_batch(position.first, position.stop, part.start, micro_batches)
    end, _ = micro_batch(position.first, position.stop, part.stop, micro_batches)
    return begin, end


class Near(NamedTuple):
    """Tells what lies where, of a dataset in parts; the same figures on all members."""

    order: PartsOrder | OwnRounds
    """Participants with data of their own are parts by themselves."""
    held: Held
    """By rank: samples of each part, or of each participant."""
    bound: bool = False
    """Whether a participant is computed by none but a rank that has all of its samples."""

    def parts_of(self, step: int, where: Position, micro_batches: int) -> list[int]:
        """The part that each micro-batch of a step draws from: that of its middle; or the
        participants of a round."""
        if isinstance(self.order, OwnRounds):
            return self.order.who(step)
        cuts = [positions_of(where, range(n, n + 1), micro_batches) for n in range(micro_batches)]
        middles = np.array([(low + high) // 2 for low, high in cuts], np.int64)
        found: list[int] = self.order.parts_at(np.minimum(middles, where.stop - 1)).tolist()
        return found

    def units(
        self,
        step: int,
        where: Position,
        micro_batches: int,
        working: Sequence[int],
        speeds: Sequence[float] | None,
        taken: Container[int] = (),
    ) -> list[list[int]]:
        """The micro-batches of each rank in a step, but for those that are taken; ranks that do not
        work have none. Where participants are bound to hosts, some may be with nobody."""
        parts = self.parts_of(step, where, micro_batches)
        held = [self.held[rank] for rank in working]
        left = [n for n, part in enumerate(parts) if n not in taken and self._may(part, held)]
        dealt = deal_near([parts[n] for n in left], held, speeds, lends=not self.bound)
        units = {r: [left[n] for n in each] for r, each in zip(working, dealt, strict=True)}
        return [units.get(rank, []) for rank in range(len(self.held))]

    def _may(self, part: int, held: Held) -> bool:
        """Whether somebody may compute it."""
        if not (self.bound and isinstance(self.order, OwnRounds)):
            return True
        return any(each[part] >= self.order.sizes[part] for each in held)

    def away(self) -> list[int]:
        """Participants whose data lie with nobody who may compute them."""
        return [n for n in range(len(self.held[0])) if not self._may(n, self.held)]

    def usual(
        self, batch: int, micro_batches: int, speeds: Sequence[float] | None, working: Sequence[int]
    ) -> list[int]:
        """How many of so many micro-batches each rank has in the first step of an epoch."""
        first = Position(0, 0, min(batch, self.order.samples))
        return [len(units) for units in self.units(1, first, micro_batches, working, speeds)]
