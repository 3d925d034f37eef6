"""One forward pass of the user's model, and what can be checked about it.

It knows the recipe's way from a batch to a loss, the device and the
precision, and nothing of workers or steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import RecipeError
from instep.run.recipe import Recipe, a_or_an


class Forward:
    """From a batch to a loss.

    Args:
        recipe: says how.
        model: on `device`.
        precision: `float32`, or the type to which autocast casts.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, device: torch.device, precision: str
    ) -> None:
        self.recipe, self.model, self.device = recipe, model, device
        self._precision = precision
        self.phase = "forward"
        """What is being done: `forward`, `loss` or a metric's name."""
        self.batches = 0
        """That were begun so far: a sign of life."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the forward pass, as a context."""
        if self._precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self._precision))

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar that can be differentiated.

        Raises:
            RecipeError: the batch is no (inputs, target), or the loss no such scalar.
        """
        loss, _, _ = self._outputs(batch)
        return loss

    def _outputs(self, batch: Any) -> tuple[Tensor, Any, Any]:
        self.phase = "forward"
        self.batches += 1
        batch = to_device(batch, self.device)
        with self.autocast():
            if self.recipe.compute_loss is not None:
                self.phase = "compute_loss"
                return (
                    checked(self.recipe.compute_loss(self.model, batch), "compute_loss"),
                    None,
                    None,
                )
            inputs, target = _pair(batch)
            outputs = self.model(inputs)
            self.phase = "loss"
            assert self.recipe.loss is not None
            return checked(self.recipe.loss(outputs, target), "loss"), outputs, target

    def measure(self, batch: Any) -> dict[str, float]:
        """Loss and metrics of one batch, in the order of the recipe."""
        with torch.set_grad_enabled(self.recipe.compute_loss is not None):  # it may need some
            loss, outputs, target = self._outputs(batch)
        values = {"loss": float(loss.detach())}
        for name, metric in self.recipe.metrics.items():
            self.phase = f"metric {name}"
            values[name] = _number(metric(outputs, target), name)
        return values


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else ""
        raise RecipeError(
            f"a batch is {a_or_an(batch)}{size}, but (inputs, target) is wanted. For other batches "
            "give compute_loss=lambda model, batch: ... instead of loss."
        )
    return batch[0], batch[1]


def checked(loss: Any, name: str) -> Tensor:
    """The loss itself, if it is one that can be trained on.

    Raises:
        RecipeError: it is no tensor, no scalar, no floating-point number, or
            (while gradients are recorded) does not depend on the parameters.
    """
    if not isinstance(loss, Tensor):
        raise RecipeError(f"Recipe.{name} returned {a_or_an(loss)}, but a scalar tensor is wanted.")
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
    return loss.reshape(())


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise RecipeError(
            f"Recipe.metrics[{name!r}] returned a tensor of shape {list(value.shape)}, "
            "but one number is wanted: the mean over the samples of the batch."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RecipeError(
            f"Recipe.metrics[{name!r}] returned {a_or_an(value)}, but one number is wanted."
        ) from None


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a nested batch on `device`; the rest as it is."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
