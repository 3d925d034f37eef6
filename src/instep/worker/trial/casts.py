"""Computes in a wide type what a forward pass casts to a narrow one itself.

A model with frozen parts in bfloat16 casts what they take and give. With every parameter in float64
such a cast would not fit the weights it is for; the trial makes the cast one to float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from instep.recipe.forward import is_narrow, widened

_CASTS = frozenset(
    {
        Tensor.to,
        Tensor.type,
        Tensor.type_as,
        Tensor.half,
        Tensor.bfloat16,
        Tensor.float,
    }
)


class WideCasts(TorchFunctionMode):
    """Casts of floating-point numbers to fewer bits than `wide` give `wide`."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._wide = wide

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function of it."""
        result = func(*args, **(kwargs or {}))
        if (
            func not in _CASTS
            or not isinstance(result, Tensor)
            or not is_narrow(result, self._wide)
        ):
            return result
        given = args[0]
        if given.is_floating_point() and not is_narrow(given, self._wide):
            return given.to(result.device, copy=True)  # as a cast does: it may be written to
        return widened(result, self._wide)
