"""How a worker runs the micro-batches it was dealt: apart, or as one larger forward pass.

One larger pass is faster, and the same to rounding unless something in the
model sees the other samples of its batch (BatchNorm), draws random numbers
(dropout), or weighs samples unevenly in the loss. `sameness.py` finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from instep.data.balance import deal
from instep.data.loader import Slice
from instep.data.order import Position, micro_batch
from instep.spec import TrainSpec

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


def parts_of(position: Position, train: TrainSpec) -> int:
    """Micro-batches of the step at `position`.

    A smaller last batch is cut into fewer, of about the same size: one of a
    single sample would be too little for a layer that looks at its batch.
    """
    return -(-(position.stop - position.first) * train.micro_batches // train.global_batch)


def share_of(
    position: Position,
    micro_batches: int,
    workers: int,
    rank: int,
    *,
    merge: bool,
    speeds: Sequence[float] | None = None,
    whole: bool = False,
) -> Share:
    """The passes of one worker in the step at `position`, cut into `micro_batches`.

    Micro-batches without samples are left out; a worker may have no pass at all.
    Merged ones are one pass, or several where a worker is dealt more than an even
    share: none is larger than that, as memory may not hold it. Unless `whole`: then all are one.
    """
    dealt = deal(micro_batches, workers, speeds)[rank]
    first, stop = positions_of(position, dealt, micro_batches)
    parts = [range(number, number + 1) for number in dealt]
    if whole:
        parts = [dealt] if dealt else []
    elif merge:
        largest = -(-micro_batches // workers)
        merged = deal(len(dealt), -(-len(dealt) // largest)) if dealt else []
        parts = [dealt[part.start : part.stop] for part in merged]
    cuts = [positions_of(position, part, micro_batches) for part in parts]
    passes = [
        Pass(Slice(position.epoch, low, high), part.start, micro_batches=len(part))
        for part, (low, high) in zip(parts, cuts, strict=True)
        if high > low
    ]
    return Share(passes, first, stop)


def share_of_these(position: Position, micro_batches: int, numbers: Sequence[int]) -> Share:
    """The passes of a worker that has just these, each apart; in their order."""
    cuts = [positions_of(position, range(n, n + 1), micro_batches) for n in numbers]
    passes = [
        Pass(Slice(position.epoch, low, high), number)
        for number, (low, high) in zip(numbers, cuts, strict=True)
        if high > low
    ]
    return Share(
        passes, cuts[0][0] if cuts else position.stop, cuts[-1][1] if cuts else position.stop
    )


def ranges_of(
    position: Position, micro_batches: int, workers: int, speeds: Sequence[float] | None = None
) -> list[tuple[int, int]]:
    """Positions [first, stop) of each worker in the step at `position`; some may be empty."""
    dealt = deal(micro_batches, workers, speeds)
    return [positions_of(position, part, micro_batches) for part in dealt]


def positions_of(position: Position, part: range, micro_batches: int) -> tuple[int, int]:
    """Where the micro-batches of `part` stand: from the begin of its first to that of the next."""
    _, first, stop = position
    begin, _ = micro_batch(first, stop, part.start, micro_batches)
    end, _ = micro_batch(first, stop, part.stop, micro_batches)
    return begin, end
