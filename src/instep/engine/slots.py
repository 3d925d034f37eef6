"""What this process has of parameters that a mesh splits: slots, plain parameters on their memory.

Strategies, norms and checksums know plain tensors; optimizers and models have DTensors. Which part
of the whole a slot is, is known to `state/boxes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from instep.comm.dtensors import is_split, split_like


class Split(Protocol):
    """How the parameters of a model lie on the ranks of a replica."""

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter one that is this rank's part of it, on the same memory. Its hooks are
        called with the gradient that is summed over the replica."""

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds its part of a parameter to a sum over the replica; one rank does,
        of those that have the same."""

    def holders(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The ranks of the replica that have the same part of a parameter, in their order."""


def give(slots: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> None:
    """Have each parameter's gradient be what its slot has, or none where it has none."""
    for slot, parameter in zip(slots, parameters, strict=True):
        if slot is parameter:
            continue
        gradient = slot.grad
        if gradient is not None and is_split(parameter):
            gradient = split_like(parameter, gradient)
        parameter.grad = gradient
