"""Buffers that get their shape from the first pass, in a model that has had none.

Observers of quantisation begin with buffers that are empty or hold one number, and a module may
register one as None. A checkpoint has them as passes left them. A fresh model takes the shape from
there; any other difference in shape is one between two models.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor, nn


def resized(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """The buffer itself, of this shape; if it had another, in new memory, without values."""
    if buffer.shape != tuple(shape):
        buffer.data = buffer.new_empty(tuple(shape))
    return buffer


def in_own_memory(buffer: Tensor) -> Tensor:
    """The buffer itself, such that its module can resize it.

    What numpy has seen (to save or compare it) torch cannot resize, and observers of quantisation
    resize buffers of at most one number.
    """
    if buffer.dim() == 1 and buffer.numel() <= 1:
        buffer.data = buffer.data.clone()
    return buffer


def sized(
    model: nn.Module, saved: Container[str], like: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """What was saved of buffers that have no shape yet in a model, or no longer.

    Args:
        model: as the recipe builds it, or after some passes.
        saved: names.
        like: from such a name to a tensor of the shape and type that were saved.
    """
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, buffer in module._buffers.items():
            name = f"{prefix}.{own}" if prefix else own
            if name not in saved:
                continue
            given = like(name)
            if buffer is None or (
                buffer.shape != given.shape
                and buffer.dtype == given.dtype
                and min(buffer.numel(), given.numel()) <= 1
            ):
                found[name] = given
    return found


def take_shapes(model: nn.Module, found: dict[str, Tensor]) -> None:
    """Give buffers the shapes that `sized` found; the values are still to be copied."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    for name, given in found.items():
        of, _, own = name.rpartition(".")
        module = model.get_submodule(of)
        buffer = module._buffers[own]
        if buffer is None:
            module._buffers[own] = torch.zeros(given.shape, dtype=given.dtype, device=device)
        else:
            resized(buffer, given.shape)
