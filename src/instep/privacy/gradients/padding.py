"""The row of an embedding that is not trained (`padding_idx`), which `vmap` forgets.

Where each sample has a weight of its own, torch (2.11 to 2.13) puts the weights under each other,
and leaves out that one row of them in place of one of each. Way in: `PaddingKept`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class PaddingKept(TorchFunctionMode):
    """In this context what a padding row gives is constant."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        found = func(*args, **named)
        if func is nn.functional.embedding:
            return _kept(found, *_of_function(*args, **named))
        return _kept(found, *_of_operation(*args, **named)) if func is torch.embedding else found


def _of_function(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> tuple[Tensor, int | None]:
    """Numbers of the rows, and the padding; as `torch.nn.functional.embedding` is called."""
    negative = padding_idx is not None and padding_idx < 0
    return input, len(weight) + padding_idx if negative else padding_idx  # type: ignore[operator]


def _of_operation(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any, **__: Any
) -> tuple[Tensor, int | None]:
    """Numbers of the rows, and the padding; as `torch.embedding` is called."""
    return indices, padding_idx if padding_idx >= 0 else None


def _kept(found: Tensor, rows: Tensor, padding: int | None) -> Tensor:
    if padding is None:
        return found
    return torch.where((rows == padding).unsqueeze(-1), found.detach(), found)
