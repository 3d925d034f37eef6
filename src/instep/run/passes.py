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
    position: Position, micro_batches: int, workers: int, rank: int, *, merge: bool
) -> Share:
    """The passes of one worker in the step at `position`, cut into `micro_batches`.

    Micro-batches without samples are left out; a worker may have no pass at all.
    """
    dealt = deal(micro_batches, workers)[rank]
    cuts = [micro_batch(position.first, position.stop, n, micro_batches) for n in dealt]
    first, stop = ranges_of(position, micro_batches, workers)[rank]
    if merge:
        numbers, cuts = [dealt.start], [(first, stop)]
    else:
        numbers = list(dealt)
    passes = [
        Pass(Slice(position.epoch, low, high), number)
        for number, (low, high) in zip(numbers, cuts, strict=True)
        if high > low
    ]
    return Share(passes, first, stop)


def ranges_of(position: Position, micro_batches: int, workers: int) -> list[tuple[int, int]]:
    """Positions [first, stop) of each worker in the step at `position`; some may be empty."""
    first, stop = position.first, position.stop
    return [
        (
            first + (stop - first) * part.start // micro_batches,
            first + (stop - first) * part.stop // micro_batches,
        )
        for part in deal(micro_batches, workers)
    ]


def plan(
    job: JobSpec, samples: int, first: int, last: int, comm: Comm, *, merge: bool
) -> Iterator[tuple[Position, Share]]:
    """The global batch of each step from `first` to `last`, and this rank's share of it."""
    for step in range(first, last + 1):
        where = position(step, samples, job.train.global_batch)
        parts = parts_of(where, job.train)
        yield where, share_of(where, parts, comm.size, comm.rank, merge=merge)


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
