"""Hooks on the gradients of parameters: a run calls them for each micro-batch."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from instep.errors import RecipeError
from instep.usercode.places import kept_by


def hooked_parameter(model: nn.Module) -> str:
    """Name a parameter with a hook on its gradient; empty if there is none."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    return ""


def refuse_stepping_hooks(model: nn.Module) -> None:
    """Refuse hooks that step an optimizer: they would move parameters on one worker alone.

    Raises:
        RecipeError: there is one.
    """
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for held in kept_by(hooks.values()):
            if isinstance(held, Optimizer):
                raise RecipeError(
                    f"a hook on the gradient of {name!r} uses an optimizer ({type(held).__name__}) "
                    "during the backward pass, with the gradient of one micro-batch on one worker. "
                    "Leave the hook out: Recipe.optimizer steps once, with that of all."
                )
