"""Optimizer state in memory of the host, where the optimizer's step is computed.

For a step, the optimizer gets copies of what this rank has of parameters and gradients, on the host
and split as these are; what it made of them is copied back. Between steps it holds the model's
parameters as always, so checkpoints, schedulers and strategies see nothing of this. Where the
parameters are on the host themselves, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.comm.dtensors import is_split, local_part
from instep.errors import RecipeError

HOST = torch.device("cpu")

_DEVICES: WeakKeyDictionary[Optimizer, torch.device] = WeakKeyDictionary()
"""Where optimizers keep their state, if not beside the parameters."""


def keep_on_host(optimizer: Optimizer, device: torch.device = HOST) -> None:
    """From now on, keep an optimizer's state on another device, and compute its steps there.

    Args:
        optimizer: of the recipe; its parameters may be DTensors.
        device: of the state.

    Raises:
        RecipeError: it cannot be done with this optimizer.
    """
    steps = _Steps(optimizer, device)
    optimizer.register_step_pre_hook(steps.begin)
    optimizer.register_step_post_hook(steps.end)
    _DEVICES[optimizer] = device


def placed(optimizer: Optimizer, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps for a parameter, on the device where it keeps it."""
    if optimizer not in _DEVICES:
        return dict(kept)
    device = _DEVICES[optimizer]
    return {
        name: _like(value, local_part(value).to(device)) if isinstance(value, Tensor) else value
        for name, value in kept.items()
    }


class _Steps:
    """Has an optimizer compute its steps on another device."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._device, self._depth = device, 0
        self._name = type(optimizer).__name__
        self._copies: dict[Tensor, nn.Parameter] = {}
        self._groups: list[list[Tensor]] = []
        self._versions: list[int] = []
        if not getattr(type(optimizer).step, "hooked", False):
            raise self._refusal("its step() runs without the hooks of torch.optim.Optimizer")
        for group in optimizer.param_groups:
            if group.get("capturable"):
                raise self._refusal("capturable = True keeps its state on the GPU")
            for name, value in group.items():
                if isinstance(value, Tensor) and value.device.type != device.type:
                    raise self._refusal(f"its {name!r} is a tensor on {value.device}")

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Give the optimizer copies in the place of the parameters."""
        self._depth += 1
        if self._depth > 1:  # its step calls that of its base class
            return
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._copy(each) for each in group["params"]]
        for parameter in self._parameters():
            if parameter in optimizer.state:
                kept = placed(optimizer, optimizer.state.pop(parameter))
                optimizer.state[self._copies[parameter]] = kept
        self._versions = [local_part(each)._version for each in self._parameters()]

    @torch.no_grad()
    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """Copy back what it moved."""
        self._depth -= 1
        if self._depth:
            return
        for parameter, version in zip(self._parameters(), self._versions, strict=True):
            own, copy = local_part(parameter), self._copies[parameter]
            moved = local_part(copy)
            if moved.data_ptr() != own.data_ptr():
                if own._version != version:
                    raise self._refusal("it moves parameters that are not in its groups")
                own.copy_(moved)
            copy.grad = None
            if copy in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(copy)
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._groups for parameter in group]

    def _copy(self, parameter: Tensor) -> nn.Parameter:
        """A parameter on the device, with the values and the gradient of another one."""
        own = local_part(parameter).detach()
        if parameter not in self._copies:
            copy = _like(parameter, self._room(own))
            self._copies[parameter] = nn.Parameter(copy, parameter.requires_grad)
        copy = self._copies[parameter]
        if local_part(copy).data_ptr() != own.data_ptr():
            local_part(copy).copy_(own)
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            if not gradient.is_sparse:
                gradient = self._room(gradient).copy_(gradient)
            copy.grad = _like(parameter.grad, gradient.to(self._device))
        return copy

    def _room(self, tensor: Tensor) -> Tensor:
        """Memory for a tensor; its own where it is on the device."""
        if tensor.device == self._device:
            return tensor
        return torch.empty_like(tensor, device=self._device, pin_memory=tensor.is_cuda)

    def _refusal(self, why: str) -> RecipeError:
        return RecipeError(
            f"mesh.offload = 'optimizer' does not go with the optimizer {self._name}: {why}. "
            "Use another optimizer, or leave the key out."
        )


def _like(whole: Tensor, part: Tensor) -> Tensor:
    """A DTensor of which this rank has `part`, on whatever device, if `whole` is one."""
    if not is_split(whole):
        return part
    from torch.distributed.tensor import DTensor

    split: Any = DTensor  # from_local would move the part to the device of the mesh
    made: Tensor = split(part, whole._spec, requires_grad=False)
    return made
