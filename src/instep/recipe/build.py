"""Calls the user's recipe function, and builds and checks the model and its optimizer.

All random generators are seeded from the job first. Everything is checked as early as possible, so
that a mistake is named in the user's terms and not by a traceback from inside instep. Processes and
steps are not known here.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from instep.data.reading import generators
from instep.errors import RecipeError, SpecError
from instep.job.start import LoraSpec, StartSpec
from instep.recipe import tuning
from instep.recipe.arguments import check_arguments
from instep.recipe.large import Building, build_in_files, build_large
from instep.recipe.lora import Adapted
from instep.recipe.optimizers.making import made_optimizer, made_scheduler
from instep.recipe.optimizers.plateau import Plateau
from instep.recipe.recipe import Recipe
from instep.words import a_or_an, listed


class BuiltTurn(NamedTuple):
    """A turn with its optimizer made and checked."""

    name: str
    parameters: list[nn.Parameter]
    """Parameters that need gradients, in the order of the model."""
    optimizer: Optimizer
    scheduler: Any


@dataclass(frozen=True)
class Built:
    """A recipe with its model and optimizer made and checked, ready to train."""

    recipe: Recipe
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    parameters: list[nn.Parameter]
    """Parameters that need gradients, each once, in the order of the model."""
    loaded: tuning.Loaded | None = None
    """The file that the model was loaded from, if any."""
    adapted: Adapted | None = None
    """What has an adapter, if the job has LoRA."""
    turns: Sequence[BuiltTurn] = ()
    """If a step has several updates; `optimizer` and `scheduler` are then the first's."""


def seed_everything(seed: int) -> None:
    """Set torch's, numpy's and Python's own generators from one number."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def set_generators(number: int) -> None:
    """The same in a tenth of the time, for each pass and each update.

    `torch.manual_seed` makes a traceback for every kind of device that is absent. Generators of
    GPUs are set once CUDA is initialised.
    """
    generators.seed_all(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def call(function: Callable[..., Any], arguments: Mapping[str, Any], seed: int) -> Recipe:
    """Call a recipe function with the job's `[arguments]`, seeded.

    Raises:
        RecipeError: it does not accept these arguments, or does not return a Recipe.
    """
    check_arguments(_name(function), inspect.signature(function), arguments)
    seed_everything(seed)
    recipe = function(**arguments)
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"the recipe function {_name(function)!r} returned {a_or_an(recipe)}, "
            "but an instep.Recipe is wanted."
        )
    return recipe


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def build_model(
    recipe: Recipe,
    seed: int,
    device: torch.device,
    start: StartSpec | None = None,
    lora: LoraSpec | None = None,
    *,
    load: bool = True,
    building: Building | None = None,
    rows_in: Path | None = None,
) -> tuple[nn.Module, tuning.Begun]:
    """Make and check the model on `device`.

    If it is too large for this process, its parameters are on the meta device or in files, until
    it is split over a mesh; then `Begun.fill` gives those on the meta device their values.

    Args:
        recipe: of the user.
        seed: of the job.
        device: where the model will be.
        start: the file to load, and what to freeze.
        lora: which layers get an adapter.
        load: whether to load the file of `start`; not if a checkpoint has the values.
        building: of a replica of several processes, what this one has memory for.
        rows_in: where large embeddings may lie in files, if this process is to keep none of them.

    Returns:
        The model, and what it was loaded from and has adapters of.

    Raises:
        RecipeError: the model has nothing to train, or is of the wrong type.
        SpecError: `start` or `lora` does not fit the recipe.
        CheckpointError: the file of `start` does not fit the model.
    """
    start, lora = start or StartSpec(), lora or LoraSpec()
    model, small = None, True
    if building is not None:
        filled = not load or bool(start.model and not start.partial)
        model, small = build_large(recipe, seed, make_model, building, filled=filled)
    elif rows_in is not None:
        model = build_in_files(recipe, seed, make_model, rows_in)
    if model is None:
        model = make_model(recipe, seed)
    _check_parameters(model, frozen=bool(lora.modules))
    begun = tuning.begin(start, lora, model, seed, load=load)._replace(small=small)
    if not begun.empty:
        model.to(device)
    return model, begun


def build_optimizer(
    recipe: Recipe,
    model: nn.Module,
    steps: int,
    start: StartSpec | None = None,
    begun: tuning.Begun = tuning.NOTHING,
) -> Built:
    """Make and check the optimizer and the scheduler of a model.

    Args:
        recipe: of the user.
        model: as `build_model` made it, or split over a mesh since.
        steps: of the whole run, for a scheduler that needs it.
        start: learning rates.
        begun: what the model was loaded from and has adapters of.

    Raises:
        RecipeError: the optimizer has nothing to train, or is of the wrong type.
        SpecError: `start` does not fit the recipe.
    """
    start, loaded, adapted = start or StartSpec(), begun.loaded, begun.adapted
    rated = begun.rated
    parameters = [p for p in model.parameters() if p.requires_grad]
    if recipe.turns:
        turns = _built_turns(recipe, model, steps)
        first = turns[0]
        _check_plateaus(recipe, [turn.scheduler for turn in turns])
        return Built(
            recipe, model, first.optimizer, first.scheduler, parameters, loaded, adapted, turns
        )
    given = _for_optimizer(recipe, start, model, parameters, rated)
    optimizer = made_optimizer(recipe, given, model)
    if start.learning_rates:
        tuning.check_rates(given, model, optimizer)
    scheduler = made_scheduler(recipe, optimizer, steps)
    _check_plateaus(recipe, [scheduler])
    return Built(recipe, model, optimizer, scheduler, parameters, loaded, adapted)


def _check_plateaus(recipe: Recipe, schedulers: Iterable[Any]) -> None:
    if recipe.validate is None and any(isinstance(each, Plateau) for each in schedulers):
        raise RecipeError(
            "the scheduler is a ReduceLROnPlateau, which takes its step with the validation loss, "
            "and the recipe has no validation dataset. Give Recipe(validate=...)."
        )


def build(
    recipe: Recipe,
    seed: int,
    device: torch.device,
    steps: int,
    start: StartSpec | None = None,
    lora: LoraSpec | None = None,
    *,
    load: bool = True,
) -> Built:
    """`build_model`, then `build_optimizer`."""
    model, begun = build_model(recipe, seed, device, start, lora, load=load)
    return build_optimizer(recipe, model, steps, start, begun)


def make_model(recipe: Recipe, seed: int) -> nn.Module:
    """The recipe's model, made from the job's seed if it is a function.

    Raises:
        RecipeError: it is no module.
    """
    model = recipe.model
    if isinstance(model, nn.Module):
        _check_unwrapped(model)
        return model
    if not callable(model):
        raise RecipeError(f"Recipe.model is {a_or_an(model)}, but an nn.Module is wanted.")
    seed_everything(seed)
    made = model()
    if not isinstance(made, nn.Module):
        raise RecipeError(f"Recipe.model() returned {a_or_an(made)}, but an nn.Module is wanted.")
    _check_unwrapped(made)
    return made


_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that something else would train on several processes or devices."""
    if (name := type(model).__name__) in _WRAPPERS:
        raise RecipeError(
            f"the model is wrapped in {name}: instep does that itself, on any number of workers. "
            "Leave it out, and give the model as it is."
        )


def _built_turns(recipe: Recipe, model: nn.Module, steps: int) -> list[BuiltTurn]:
    """The optimizers of all turns; every parameter must be trained by exactly one."""
    every, owner, built = dict(model.named_parameters()), dict[str, str](), []
    for turn in recipe.turns:
        names = turn.names(model)
        if not names:
            raise RecipeError(
                f"turns[{turn.name!r}].parameters returned none that needs gradients."
            )
        for name in names:
            if name in owner:
                raise RecipeError(
                    f"the parameter {name!r} is trained by two turns, {owner[name]!r} and "
                    f"{turn.name!r}: leave it to one."
                )
            owner[name] = turn.name
        parameters = [every[name] for name in names]
        optimizer = made_optimizer(turn, parameters, model, parameters, f"turns[{turn.name!r}]")
        scheduler = made_scheduler(turn, optimizer, steps, f"turns[{turn.name!r}]")
        built.append(BuiltTurn(turn.name, parameters, optimizer, scheduler))
    if left := [repr(name) for name, p in every.items() if p.requires_grad and name not in owner]:
        raise RecipeError(
            f"no turn trains {listed(left, 4)}: give them to a turn, or "
            "freeze them with requires_grad_(False), or start.freeze in the job."
        )
    return built


def _for_optimizer(
    recipe: Recipe,
    start: StartSpec,
    model: nn.Module,
    parameters: list[nn.Parameter],
    rated: Iterable[str | None],
) -> Any:
    """The argument of the recipe's `optimizer` function."""
    if recipe.parameters is None:
        return tuning.groups(start, model, parameters, rated)
    if start.learning_rates:
        raise SpecError(
            "start.learning_rates makes groups of the parameters, and so does the recipe "
            "(Recipe.parameters). Leave one of them out."
        )
    return recipe.parameters(model)


def _check_parameters(model: nn.Module, *, frozen: bool) -> None:
    """Refuse a model that cannot be trained; `frozen`: whether all of it may be frozen."""
    every = list(model.parameters())
    if not every:
        raise RecipeError(f"the model ({type(model).__name__}) has no parameters to train.")
    if not frozen and not any(p.requires_grad for p in every):
        raise RecipeError(
            f"all {len(every)} parameters of the model ({type(model).__name__}) are frozen: "
            "set requires_grad on those that should be trained."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RecipeError(
                f"the parameter {name!r} is lazy and has no shape yet: run one batch through the "
                "model in the recipe before returning it."
            )
        if parameter.is_complex():
            raise RecipeError(
                f"the parameter {name!r} is complex ({parameter.dtype}), which instep cannot train."
            )
