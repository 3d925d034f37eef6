"""Makes the optimizers and schedulers of a recipe, and checks what came of it.

It knows no model beside what an optimizer is given. Way in: `made_optimizer`, `made_scheduler`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.errors import InstepError, RecipeError
from instep.recipe.optimizers import two_points
from instep.recipe.optimizers.checks import check_optimizer, check_scheduler, check_stepped_alone
from instep.recipe.optimizers.combined import CombinedOptimizer
from instep.recipe.optimizers.plateau import Plateau
from instep.recipe.recipe import Recipe, Turn
from instep.words import a_or_an


def made_optimizer(
    of: Recipe | Turn,
    given: Any,
    model: nn.Module,
    trained: Iterable[nn.Parameter] | None = None,
    where: str = "Recipe",
) -> Optimizer:
    """The optimizer of a recipe or turn, checked.

    Args:
        of: has the function that makes it.
        given: the argument of that function.
        model: whose parameters it trains.
        trained: by this optimizer; None for all of the model's.
        where: what errors call `of`.
    """
    assert of.optimizer is not None
    optimizer = _made(f"{where}.optimizer", of.optimizer, given)
    if isinstance(optimizer, (list, tuple)) and all(isinstance(o, Optimizer) for o in optimizer):
        optimizer = _combined(optimizer)
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        raise RecipeError(
            f"{where}.optimizer() returned what accelerator.prepare has made of an optimizer: "
            "leave prepare out, and give the optimizer as it is."
        )
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(
            f"{where}.optimizer() returned {a_or_an(optimizer)}, "
            "but a torch.optim.Optimizer is wanted, or a list of them."
        )
    check_optimizer(optimizer, model, trained)
    two_points.begin(optimizer)
    return optimizer


def _combined(optimizers: Sequence[Optimizer]) -> Optimizer:
    if not optimizers:
        raise RecipeError("Recipe.optimizer() returned an empty list, but an optimizer is wanted.")
    for each in optimizers:
        check_stepped_alone(each)
    held = [id(p) for each in optimizers for group in each.param_groups for p in group["params"]]
    if len(held) != len(set(held)):
        raise RecipeError(
            "Recipe.optimizer() returned several optimizers, and two of them hold the same "
            "parameter. Give each its own."
        )
    return CombinedOptimizer(optimizers) if len(optimizers) > 1 else optimizers[0]


def made_scheduler(
    of: Recipe | Turn, optimizer: Optimizer, steps: int, where: str = "Recipe"
) -> Any:
    """The scheduler of a recipe or turn for so many steps; None if it has none."""
    if of.scheduler is None:
        return None
    tells = "steps" in inspect.signature(of.scheduler).parameters
    given = (optimizer, steps) if tells else (optimizer,)
    scheduler = _made(f"{where}.scheduler", of.scheduler, *given)
    if not hasattr(scheduler, "step"):
        raise RecipeError(
            f"{where}.scheduler() returned {a_or_an(scheduler)}, which has no step()."
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return Plateau(scheduler, f"{where}.scheduler")
    check_scheduler(scheduler)
    return scheduler


def _made(name: str, factory: Callable[..., Any], *given: Any) -> Any:
    try:
        return factory(*given)
    except InstepError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{name}() refused what it was given: {error}.") from error
