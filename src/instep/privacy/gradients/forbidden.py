"""Layers that no private training can have: they look at other samples, or remember them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from instep.errors import RecipeError


def refuse(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what cannot be private.

    Raises:
        RecipeError: a layer looks at other samples, remembers them, or shows which rows it used.
    """
    for name, layer in model.named_modules():
        what = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise RecipeError(
                f"[privacy]: {what} looks at all samples of a batch, so no gradient is of one "
                "sample alone. Use GroupNorm or LayerNorm."
            )
        if getattr(layer, "track_running_stats", False):
            raise RecipeError(
                f"[privacy]: {what} keeps means of its inputs, which would be published without "
                "noise. Set track_running_stats=False."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise RecipeError(
                f"[privacy]: {what} shortens the rows that a batch reads (max_norm), without "
                "noise. Leave max_norm out."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise RecipeError(
                f"[privacy]: {what} has sparse gradients: which rows they have says what was in a "
                "batch. Set sparse=False."
            )
    for name, each in model.named_parameters():
        if any(each is one for one in parameters) and each.dtype != torch.float32:
            raise RecipeError(
                f"[privacy]: parameter {name!r} is of {each.dtype}; float32 is wanted."
            )
