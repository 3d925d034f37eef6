"""What this process has of parameters that a mesh splits: slots, plain parameters on their memory.

Strategies, norms and checksums know plain tensors; optimizers and models have DTensors. Which part
of the whole a slot is, is known to `state/boxes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from instep.state.boxes import is_split


class Split(Protocol):
    """How the parameters of a model lie on the ranks of a replica."""

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter one that is this rank's part of it, on the same memory. Its hooks are
        called with the gradient that is summed over the replica."""

    def counts(self, slot: nn.Parameter) -> bool:
        """Whether this rank adds its part to a sum over the replica; one rank does, of those that
        have the same."""


def give(slots: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> None:
    """Have each parameter's gradient be what its slot has, or none where it has none."""
    for slot, parameter in zip(slots, parameters, strict=True):
        if slot is not parameter:
            parameter.grad = None if slot.grad is None else _split_like(parameter, slot.grad)


def _split_like(whole: Tensor, part: Tensor) -> Tensor:
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
