"""Which samples a micro-batch has, and what of a model travels with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from instep.data.order import Position, position, steps_in_epoch
from instep.engine.passes import parts_of, positions_of
from instep.job.train import TrainSpec
from instep.sync.generation import Piece
from instep.sync.servers.cuts import Packed, shares
from instep.sync.servers.leases import Unit


class Portions:
    """The micro-batches of a job.

    Args:
        samples: of the dataset.
        train: the job's.
    """

    def __init__(self, samples: int, train: TrainSpec) -> None:
        self._samples, self._train = samples, train

    def where(self, step: int) -> Position:
        """The global batch of a step."""
        return position(step, self._samples, self._train.global_batch)

    def count(self, step: int) -> int:
        """How many micro-batches a step has."""
        return parts_of(self.where(step), self._train)

    def size(self, step: int) -> int:
        """Samples of a step."""
        where = self.where(step)
        return where.size

    def of(self, unit: Unit) -> tuple[int, int]:
        """Positions [first, stop) of a micro-batch in its epoch."""
        numbers = range(unit.number, unit.number + 1)
        return positions_of(self.where(unit.step), numbers, self.count(unit.step))

    def before(self, step: int) -> int:
        """How many micro-batches all steps up to this one have."""
        each = steps_in_epoch(self._samples, self._train.global_batch)
        epochs, rest = divmod(step, each)
        whole = (each - 1) * self.count(1) + self.count(each)
        return epochs * whole + rest * self.count(1)


class Parcel:
    """Room for what travels: something for each piece of parameters, and for each buffer.

    Args:
        parameters: those that are trained.
        pieces: those of a server.
        buffers: those that travel with them.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self._packed = Packed(pieces, parameters), Packed(whole_pieces(buffers), buffers)
        self.flats = [packed.flat for packed in self._packed]
        """[bytes] each, to be sent."""
        self.pieces, self.buffers = map(_views, self._packed)

    def load(self) -> None:
        """Take the values of pieces and buffers."""
        for packed in self._packed:
            packed.load()

    def store(self) -> None:
        """Give pieces and buffers these values."""
        for packed in self._packed:
            packed.store()


def whole_pieces(tensors: Sequence[Tensor]) -> list[Piece]:
    """Each as one piece."""
    return [Piece(n, 0, tensor.numel()) for n, tensor in enumerate(tensors)]


def pieces_of(parameters: Sequence[Tensor], servers: int, *, by_element: bool) -> list[list[Piece]]:
    """Of each server, what it has of the parameters; the same in every process."""
    if servers == 1:
        return [whole_pieces(parameters)]
    return shares(parameters, servers, by_element=by_element)


def _views(packed: Packed) -> list[Tensor]:
    return [packed.views[piece] for piece in sorted(packed.views)]


def buffers_of(model: nn.Module) -> list[Tensor]:
    """The buffers of a model, each once; those without elements are left out."""
    return [buffer for buffer in model.buffers() if buffer.numel()]


def frozen_in(model: nn.Module, trained: Sequence[Tensor]) -> Parcel:
    """Room for the other parameters of a model, which no update moves."""
    apart = {id(parameter) for parameter in trained}
    frozen = [each for each in model.parameters() if id(each) not in apart and each.numel()]
    return Parcel(frozen, whole_pieces(frozen))


@torch.no_grad()
def changes(now: Sequence[Tensor], before: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """What a pass has added to buffers."""
    for one, other, change in zip(now, before, into, strict=True):
        if one.dtype == torch.bool:
            torch.logical_xor(one, other, out=change)
        else:
            torch.sub(one, other, out=change)


@torch.no_grad()
def change(buffers: Sequence[Tensor], by: Sequence[Tensor]) -> None:
    """Add to buffers what a pass has added to its own."""
    for buffer, each in zip(buffers, by, strict=True):
        if buffer.dtype == torch.bool:
            buffer.logical_xor_(each)
        else:
            buffer.add_(each)
