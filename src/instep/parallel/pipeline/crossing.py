"""What crosses a cut: tensors forward, their gradients backward.

Processes and messages are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.errors import RecipeError
from instep.parallel.pipeline.arrivals import Arrival


class Boundary(NamedTuple):
    """What crosses the cut in front of a block."""

    places: tuple[int, ...]
    """Of the tensors, among the leaves of the block's arguments."""
    differentiable: tuple[bool, ...]
    """For each, whether a gradient comes back."""

    def sent(self, leaves: Sequence[Any], block: str) -> list[Tensor]:
        """The tensors among the leaves of the block's arguments, on the stage that computed them.

        Raises:
            RecipeError: they are not what they were when the model was examined.
        """
        found = [leaves[place] if place < len(leaves) else None for place in self.places]
        for tensor, differentiable in zip(found, self.differentiable, strict=True):
            if not isinstance(tensor, Tensor) or (tensor.requires_grad and not differentiable):
                raise self._changed(block)
        return [tensor for tensor in found if isinstance(tensor, Tensor)]

    def returning(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Those of the sent tensors whose gradients come back."""
        return [tensor for tensor, one in zip(sent, self.differentiable, strict=True) if one]

    def expect(self, arrivals: Sequence[Arrival], block: str) -> None:
        """RecipeError if these are not the tensors that will be sent."""
        if tuple(arrival.place for arrival in arrivals) != self.places:
            raise self._changed(block)

    def _changed(self, block: str) -> RecipeError:
        return RecipeError(
            f"mesh.stages: the block {block!r} is called with other arguments than when the model "
            "was examined: a pipeline needs the same tensors in the same places for every batch."
        )


class StageEntry:
    """The begin of a stage's graph, at the tensors from the stage before.

    Blocks may change them in place, as they may in the whole model.
    """

    def __init__(self) -> None:
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.grads: Sequence[Tensor | None] = ()

    def begin(self, tensors: Sequence[Tensor], differentiable: Sequence[bool]) -> list[Tensor]:
        """New tensor objects that begin a graph, with the same values; nothing is copied.

        Args:
            tensors: what came.
            differentiable: for each, whether a gradient is wanted.
        """
        made = [tensor.detach() for tensor in tensors]
        moving = [tensor for tensor, one in zip(made, differentiable, strict=True) if one]
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in moving]
        self.grads = [None] * len(moving)
        if moving and torch.is_grad_enabled():
            token = torch.empty(0, requires_grad=True)
            moving = list(_Begin.apply(token, self, moving))  # type: ignore[no-untyped-call]
        rest = iter(moving)
        return [
            next(rest) if one else tensor for tensor, one in zip(made, differentiable, strict=True)
        ]

    def gradients(self) -> list[Tensor]:
        """Of the differentiable ones, contiguous; after the backward pass."""
        return [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.contiguous()
            for grad, (shape, dtype, device) in zip(self.grads, self._like, strict=True)
        ]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, entry: StageEntry, values: list[Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        return tuple(values)  # no inputs of this function, so they may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.entry.grads = grads
        return None, None, None


def go_back(sent: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The backward pass of a stage, from the gradients of what it sent."""
    pairs = [(t, grad) for t, grad in zip(sent, grads, strict=True) if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
