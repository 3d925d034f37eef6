"""What this process has of a tensor that a mesh splits, as a plain tensor on the same memory.

Strategies, norms and checksums know plain tensors; optimizers and models have DTensors. A plain
tensor is its own part. Which part of the whole it is, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Split(Protocol):
    """How the parameters of a model lie on the ranks of a replica."""

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter one that is this rank's part of it, on the same memory. Its hooks are
        called with the gradient that is summed over the replica."""

    def counts(self, slot: nn.Parameter) -> bool:
        """Whether this rank adds its part to a sum over the replica; one rank does, of those that
        have the same."""


def is_split(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; without importing those, which takes half as long as torch."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor: a view, without a collective."""
    part: Tensor = tensor.to_local() if is_split(tensor) else tensor
    return part


def give(slots: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> None:
    """Have each parameter's gradient be what its slot has, or none where it has none."""
    for slot, parameter in zip(slots, parameters, strict=True):
        if slot is not parameter:
            parameter.grad = None if slot.grad is None else split_like(parameter, slot.grad)


def split_like(whole: Any, part: Tensor) -> Tensor:
    """A DTensor of which this rank has `part`, split as another one; the part, if that is whole."""
    if not is_split(whole):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.size(),
        stride=whole.stride(),
    )
