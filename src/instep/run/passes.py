"""How a worker runs the micro-batches it was dealt: apart, or as one larger forward pass.

One larger pass is faster, and the same to rounding unless something in the
model sees the other samples of its batch (BatchNorm), draws random numbers
(dropout), or weighs samples unevenly in the loss. No list of layers can know
what a user's own layer does, so it is tried: two micro-batches, apart and
together, must give the same loss, move no buffer and draw no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.balance import deal
from instep.data.keyed import states
from instep.data.loader import Slice
from instep.data.order import Position, micro_batch, position
from instep.run.buffers import Buffers
from instep.run.forward import Forward
from instep.spec import JobSpec, TrainSpec

OF_PASS = 1
"""What a key is drawn for, beside the draws of the data layer: one forward pass."""


class Pass(NamedTuple):
    """One forward and backward pass of a worker in a step."""

    samples: Slice
    number: int
    """Of its first micro-batch."""
    repeats: bool = False
    """Whether it is another worker's, computed a second time: then it counts nothing."""

    @property
    def size(self) -> int:
        """Samples in it."""
        return self.samples.stop - self.samples.first


class Share(NamedTuple):
    """What one worker does in one step."""

    passes: list[Pass]
    first: int
    stop: int
    """Positions [first, stop) of the epoch's order."""


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
) -> Share:
    """The passes of one worker in the step at `position`, cut into `micro_batches`.

    Micro-batches without samples are left out; a worker may have no pass at all.
    Merged ones are one pass, or several where a worker is dealt more than an even
    share: none is larger than that, as memory may not hold it.
    """
    dealt = deal(micro_batches, workers, speeds)[rank]
    first, stop = _positions(position, dealt, micro_batches)
    parts = [range(number, number + 1) for number in dealt]
    if merge:
        largest = -(-micro_batches // workers)
        merged = deal(len(dealt), -(-len(dealt) // largest)) if dealt else []
        parts = [dealt[part.start : part.stop] for part in merged]
    cuts = [_positions(position, part, micro_batches) for part in parts]
    passes = [
        Pass(Slice(position.epoch, low, high), part.start)
        for part, (low, high) in zip(parts, cuts, strict=True)
        if high > low
    ]
    return Share(passes, first, stop)


def ranges_of(
    position: Position, micro_batches: int, workers: int, speeds: Sequence[float] | None = None
) -> list[tuple[int, int]]:
    """Positions [first, stop) of each worker in the step at `position`; some may be empty."""
    dealt = deal(micro_batches, workers, speeds)
    return [_positions(position, part, micro_batches) for part in dealt]


def _positions(position: Position, part: range, micro_batches: int) -> tuple[int, int]:
    """Where the micro-batches of `part` stand: from the begin of its first to that of the next."""
    _, first, stop = position
    begin, _ = micro_batch(first, stop, part.start, micro_batches)
    end, _ = micro_batch(first, stop, part.stop, micro_batches)
    return begin, end


def plan(
    job: JobSpec,
    samples: int,
    first: int,
    last: int,
    comm: Comm,
    *,
    merge: bool,
    speeds: Sequence[float] | None = None,
) -> Iterator[tuple[Position, Share]]:
    """The global batch of each step from `first` to `last`, and this rank's share of it."""
    for step in range(first, last + 1):
        where = position(step, samples, job.train.global_batch)
        parts = parts_of(where, job.train)
        yield where, share_of(where, parts, comm.size, comm.rank, merge=merge, speeds=speeds)


class Merging(NamedTuple):
    """Whether micro-batches may be merged, and why."""

    merge: bool
    reason: str


_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}


def may_merge(
    forward: Forward, model: nn.Module, apart: Sequence[Any], sizes: Sequence[int], together: Any
) -> Merging:
    """Try whether any layer can tell `together` from the batches `apart`.

    Args:
        forward: how a loss is computed.
        model: is tried in training mode, and left as it was found.
        apart: two batches.
        sizes: their samples.
        together: the same samples as one batch.
    """
    buffers = Buffers(model)
    before, on_cuda = states(), _draws()
    with _training(model):  # with gradients, as a loss may be made of some
        losses = [float(forward.loss(batch).detach()) for batch in apart]
        whole = float(forward.loss(together).detach())
    moved = buffers.after_pass(1.0, 0)
    drew = not (states().same(before) and all(map(torch.equal, _draws(), on_cuda)))
    if moved:
        return Merging(False, "the model's buffers follow its batches, as BatchNorm's do")
    if drew:
        return Merging(False, "the forward pass draws random numbers, as dropout does")
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, 2e-2)
    if not math.isclose(mean, whole, rel_tol=tolerance, abs_tol=tolerance):
        return Merging(
            False, f"two micro-batches lose {mean:.8g} apart and {whole:.8g} as one batch"
        )
    return Merging(True, "a trial showed that no layer can tell the difference")


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """The mode in which it will train: a pretrained model often comes in that of evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _draws() -> list[Tensor]:
    """What a draw on any GPU changes."""
    return torch.cuda.get_rng_state_all() if _on_cuda() else []


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
