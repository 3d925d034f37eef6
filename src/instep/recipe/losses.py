"""Losses that a user's function returns, checked; and with `data.balance = "reweight"` weighed.

Then the loss of a step is the sum of all weighted losses over the sum of all weights of the global
batch, however that is cut, so a micro-batch that lacks a class is no special case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import RecipeError
from instep.recipe.weights import WeightedLoss, torch_loss_of
from instep.words import a_or_an


def weighed_loss_of(
    loss: Callable[[Any, Any], Any] | None,
    outputs: Any,
    target: Any,
    weights: Tensor | None = None,
) -> tuple[Any, float | None]:
    """A recipe's loss of the outputs of its model, and how much it weighs if `weights` tell.

    Raises:
        RecipeError: the outputs are no tensor, and the loss does not accept them.
    """
    assert loss is not None, "a recipe with a loss of its outputs"
    try:
        if weights is not None:
            total, own = weighed(loss, outputs, target, weights)
            return total / (own or 1.0), own
        return loss(outputs, target), None
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


def loss_of(loss: Callable[[Any, Any], Any], outputs: Any, target: Any) -> Any:
    """Loss of the outputs of a model, where all samples count the same."""
    return weighed_loss_of(loss, outputs, target)[0]


def check_reweightable(loss: Any, compute_loss: Any) -> None:
    """Refuse losses of a recipe that say nothing of single samples.

    Raises:
        RecipeError: it is neither a loss of torch with the mean, nor a function that can say.
    """
    if compute_loss is not None:
        return
    found = torch_loss_of(loss)
    if found is None or not found.is_mean:
        raise RecipeError(
            "data.balance = 'reweight' weighs the loss of each sample, which Recipe.loss does not "
            "give: it is no loss of torch with reduction = 'mean'. Give compute_loss=..., and "
            "return instep.WeightedLoss(total, weight) with one number for each sample."
        )


def weighed(
    loss: Callable[[Any, Any], Any], outputs: Any, target: Any, weights: Tensor
) -> tuple[Tensor, float]:
    """A loss of torch over samples that count differently.

    Args:
        loss: its mean, of outputs and target.
        outputs, target: of a batch.
        weights: [samples], what each counts.

    Returns:
        The weighted sum of the losses, and the weighted sum of what the loss is a mean of.
    """
    losses = _unreduced(loss)(outputs, target)
    rows = len(weights)
    if losses.dim() == 0 or len(losses) != rows:
        raise RecipeError(
            f"data.balance = 'reweight': a batch of {rows} samples has losses of shape "
            f"{list(losses.shape)}, and one row for each sample is wanted. Have collate keep them."
        )
    own = weights.to(losses.device, torch.float64)
    counts = _counts(loss, losses, target).reshape(rows, -1).sum(1)
    total = (losses.reshape(rows, -1).sum(1) * own.to(losses.dtype)).sum()
    return total, float((counts * own).sum())


def weighed_own(found: Any, weights: Tensor | None, name: str) -> Any:
    """Weigh what a function of the user's gives for samples; each as one where `weights` is None.

    Raises:
        RecipeError: it has not one number for each sample.
    """
    if not isinstance(found, WeightedLoss):
        if weights is None:
            return found
        raise RecipeError(
            f"data.balance = 'reweight' weighs the loss of each sample, and {name} returned one "
            "number for the batch. Return instep.WeightedLoss(total, weight) with a total of each "
            "sample."
        )
    total, weight = found.total, found.weight
    if weights is None and not (isinstance(total, Tensor) and total.dim() == 1):
        return found
    rows = len(total) if weights is None else len(weights)
    if not isinstance(total, Tensor) or total.shape != (rows,):
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise RecipeError(
            f"data.balance = 'reweight': {name} returned a WeightedLoss with a total of {shape}, "
            f"and the losses of {rows} samples are wanted: a tensor of shape [{rows}], and a "
            "weight of the same shape or one number."
        )
    own = total.new_ones(rows) if weights is None else weights.to(total.device, total.dtype)
    each = weight.detach() if isinstance(weight, Tensor) else torch.tensor(float(weight))
    counts = each.to(total.device, torch.float64).expand(rows) * own.double()
    return WeightedLoss((total * own).sum(), counts.sum())


def _unreduced(loss: Any) -> Any:
    if isinstance(loss, nn.Module):
        each = copy.copy(loss)
        vars(each)["reduction"] = "none"
        return each
    return partial(loss, reduction="none")


def _counts(loss: Any, losses: Tensor, target: Any) -> Tensor:
    """How much each of the losses has of what the mean is of, in the shape of the losses."""
    ones: Tensor = torch.ones_like(losses, dtype=torch.float64)
    found = torch_loss_of(loss)
    if found is None or not found.by_classes or target.is_floating_point():
        return ones
    ones = ones * (target != found.ignored)
    if found.classes is not None:
        known = target.clamp(0, len(found.classes) - 1)
        ones = ones * found.classes.to(target.device, torch.float64)[known]
    return ones
