"""Casts of a forward pass to a narrow type, which the trial makes casts to a wide one.

A model with frozen parts in bfloat16 casts what they take and give. With every parameter in float64
such a cast would not fit the weights it is for. Where nothing else that a pass computes is narrow,
a difference far below the rounding of float32 is a true one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from instep.parallel.nested import tensors_in
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

_LEAVES = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""Ways out of torch, to code that may compute in any type."""


class WideCasts(TorchFunctionMode):
    """Casts of floating-point numbers to fewer bits than `wide` give `wide`.

    Args:
        wide: the type that the trial computes in.
        leaves: whether to leave casts as they are, and only to watch.
    """

    def __init__(self, wide: torch.dtype, *, leaves: bool = False) -> None:
        super().__init__()
        self._wide, self._leaves = wide, leaves
        self._watches, self._saw_narrow = True, False

    @property
    def all_wide(self) -> bool:
        """Whether functions of the first pass rounded to float64, and none left torch."""
        return self._wide is torch.float64 and not self._saw_narrow

    def __exit__(self, *of_error: Any) -> None:
        """End a pass; the first is looked at."""
        self._watches = False
        super().__exit__(*of_error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function of it."""
        result = func(*args, **(kwargs or {}))
        if self._leaves or func not in _CASTS:
            if self._watches and not self._saw_narrow:
                self._saw_narrow = func in _LEAVES or self._rounds(result, (args, kwargs))
            return result
        if not isinstance(result, Tensor) or not is_narrow(result, self._wide):
            return result
        given = args[0]
        if given.is_floating_point() and not is_narrow(given, self._wide):
            return given.to(result.device, copy=True)  # as a cast does: it may be written to
        return widened(result, self._wide)

    def _rounds(self, result: Any, given: Any) -> bool:
        """Whether a result is narrow and rounded by what a batch has, its values or how many.

        Constants are not, computed one by one: each is the same in every batch.
        """
        narrow = [tensor for tensor in tensors_in(result) if is_narrow(tensor, self._wide)]
        if not narrow:
            return False
        floats = [tensor for tensor in tensors_in(given) if tensor.is_floating_point()]
        if not all(is_narrow(tensor, self._wide) for tensor in floats):
            return True
        largest = max((tensor.numel() for tensor in floats), default=0)
        where = {tensor.untyped_storage().data_ptr() for tensor in floats}
        return any(
            tensor.numel() < largest and tensor.untyped_storage().data_ptr() not in where
            for tensor in narrow
        )
