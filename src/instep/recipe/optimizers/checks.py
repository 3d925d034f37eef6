"""Checks of optimizers and schedulers before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.errors import RecipeError
from instep.words import listed


def check_optimizer(
    optimizer: Optimizer, model: nn.Module, trained: Iterable[nn.Parameter] | None = None
) -> None:
    """Refuse an optimizer of other tensors than the model's parameters, or of too few.

    Args:
        optimizer: of the recipe, or of one turn.
        model: the parameters are its.
        trained: by this optimizer; None for all of the model's.

    Raises:
        RecipeError: it holds tensors that are not the model's parameters, or only a part of
            those that need gradients, or needs the loss to be evaluated several times a step.
    """
    own = {id(p) for p in (model.parameters() if trained is None else trained)}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in own for p in held):
        raise RecipeError(
            "the optimizer holds none of the model's parameters. Build it from what it is given: "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    strangers = [list(p.shape) for p in held if id(p) not in own]
    if strangers:
        raise RecipeError(
            f"the optimizer holds {len(strangers)} tensors that are not the model's parameters "
            f"(the first has shape {strangers[0]}): only those are summed over the workers. Make "
            "them part of it."
            if trained is None
            else f"the optimizer of a turn holds {len(strangers)} tensors that are not its "
            f"parameters (the first has shape {strangers[0]}). Build it from what it is given."
        )
    moved = {id(p) for p in held}
    needed = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) in own]
    left = sorted(repr(name) for name, parameter in needed if id(parameter) not in moved)
    if left:
        total = len(needed)
        raise RecipeError(
            f"the optimizer holds {total - len(left)} of the model's {total} parameters that need "
            f"gradients: {listed(left, 4)} would never be trained. "
            "Give it all parameters; or freeze the others with requires_grad_(False), or "
            "start.freeze in the job."
        )
    check_stepped_alone(optimizer)


def check_stepped_alone(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose `step` needs an argument, or the loss several times.

    Raises:
        RecipeError: it does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecipeError(
            "LBFGS evaluates the loss several times a step, which instep does not do."
        )
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):  # by a scheduler, in a plain function
        step = MethodType(inspect.unwrap(step), optimizer)
    if wanted := _wanted_by(step):
        name = type(optimizer).__name__
        raise RecipeError(
            f"{name}.step() wants {wanted!r}: instep calls step() without arguments, once a step, "
            "with the gradients of all workers. An optimizer that evaluates the loss itself "
            f"cannot be used; if {name} wraps another one, give that."
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose `step` needs an argument.

    Raises:
        RecipeError: it wants something, such as a metric.
    """
    wanted = _wanted_by(scheduler.step) if scheduler is not None else ""
    if wanted:
        raise RecipeError(
            f"{type(scheduler).__name__}.step() wants {wanted!r}: a scheduler is advanced after "
            "every step without arguments. Use one that depends on the step alone, such as "
            "CosineAnnealingLR."
        )


def _wanted_by(step: Callable[..., Any]) -> str:
    """The first argument that `step` cannot be called without; empty if there is none."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C: unknown
        return ""
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return next((p.name for p in named if p.default is p.empty), "")
