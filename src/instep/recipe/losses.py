"""Losses that a user's function returns, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from instep.errors import RecipeError
from instep.words import a_or_an


def loss_of(loss: Callable[[Any, Any], Any], outputs: Any, target: Any) -> Any:
    """A recipe's loss of the outputs of its model.

    Raises:
        RecipeError: the outputs are no tensor, and the loss does not accept them.
    """
    try:
        return loss(outputs, target)
    except (TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        if isinstance(outputs, Tensor):
            raise
        given = type(outputs).__name__
        parts = f" ({', '.join(map(repr, outputs))})" if isinstance(outputs, Mapping) else ""
        said = str(error).strip().splitlines()
        raise RecipeError(
            f"the model returns a {given}{parts}, which Recipe.loss cannot take "
            f"({type(error).__name__}: {said[0] if said else 'no text'}). Give "
            "compute_loss=lambda model, batch: ... instead of loss, and take from the outputs "
            "what the loss is of."
        ) from error


def checked(loss: Any, name: str) -> Tensor:
    """The loss itself, if it can be trained on.

    Raises:
        RecipeError: it is no tensor, no scalar, no floating-point number, or
            (while gradients are recorded) does not depend on the parameters.
    """
    if not isinstance(loss, Tensor):
        hint = (
            " A loss that is a mean of something else than samples is an "
            "instep.WeightedLoss(total, weight)."
            if name.endswith("compute_loss") and isinstance(loss, tuple)
            else ""
        )
        raise RecipeError(
            f"Recipe.{name} returned {a_or_an(loss)}, but a scalar tensor is wanted.{hint}"
        )
    if loss.numel() != 1:
        raise RecipeError(
            f"Recipe.{name} returned a tensor of shape {list(loss.shape)}, but a scalar is wanted: "
            "the mean over the samples of the batch."
        )
    if not loss.is_floating_point():
        raise RecipeError(
            f"Recipe.{name} returned {loss.dtype}, but a floating-point loss is wanted."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise RecipeError(
            f"the loss that Recipe.{name} returned does not depend on the model's parameters: "
            "something detached it (no_grad, .item(), .data, or a new torch.tensor)."
        )
    return loss.reshape(()) if loss.dim() else loss
