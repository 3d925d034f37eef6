"""What the user brings: a function that returns model, data, loss and optimizer.

This module finds that function, calls it with every generator seeded from the
job, and checks what comes back as early as it can be checked, so that a
mistake is named in the user's words and not by a traceback from our depths.
It knows nothing of processes or steps.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.data.reading import generators
from instep.data.torch_loader import LoaderParts, unpack_loader
from instep.errors import InstepError, RecipeError, SpecError, near_miss
from instep.recipe import tuning
from instep.spec import StartSpec
from instep.system.causes import sentence


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training that is not about machines."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it."""

    train: Any
    """Map-style dataset: `len(train)` samples, `train[i]` one of them, `(inputs, target)`; or a
    `DataLoader` of one."""

    optimizer: Callable[[Any], Optimizer]
    """From the parameters to an optimizer: `lambda p: torch.optim.AdamW(p, lr=1e-3)`."""

    loss: Callable[[Any, Any], Tensor] | None = None
    """`loss(model(inputs), target)`, a mean over the batch: of its samples, unless `weight` says
    what else."""

    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    """Instead of `loss`, where a batch is not (inputs, target): `compute_loss(model, batch)`, a
    scalar or an `instep.WeightedLoss`."""

    embed: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None
    """With `batch_loss`, instead of a loss: `embed(model, batch)` gives `(embeddings, targets)`,
    tensors with a row for each sample, or tuples or dicts of them; targets may be None."""

    batch_loss: Callable[[nn.Module, Any, Any], Tensor] | None = None
    """`batch_loss(model, embeddings, targets)`, both of the whole global batch: a contrastive loss,
    say."""

    weight: Callable[[Any], float] | None = None
    """`weight(batch)`: how much of what the loss is a mean of a batch holds, such as its tokens
    that count; its samples otherwise. A loss of torch knows its own (class weights,
    `ignore_index`), and a `compute_loss` may return an `instep.WeightedLoss` instead."""

    validate: Any = None
    """Dataset to validate on; each sample counts once."""

    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """Name to `metric(outputs, target)`, the mean over the samples of a batch."""

    collate: Callable[[list[Any]], Any] | None = None
    """From a list of samples to a batch; torch's default otherwise."""

    augment: Callable[[Any, torch.Generator], Any] | None = None
    """`augment(sample, generator)`: a training sample's random change, keyed by the sample."""

    scheduler: Callable[..., Any] | None = None
    """From `(optimizer)`, or `(optimizer, steps)` of the whole run, to a learning-rate
    scheduler, advanced after every step."""

    parameters: Callable[[nn.Module], Any] | None = None
    """What the optimizer is given, for parameter groups; all that need gradients otherwise."""

    given: dict[str, LoaderParts] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """How `train` and `validate` are read; a `DataLoader` in their place is taken apart."""

    def __new__(cls, **given: Any) -> Recipe:
        """Check the names of what is given.

        Raises:
            RecipeError: a Recipe has no part of that name, or a needed one is not there.
        """
        parts = [f.name for f in fields(cls) if f.init]
        for name in given:
            if name not in parts:
                raise RecipeError(f"a Recipe has no {name!r}. {near_miss(name, parts)}")
        for name in ("model", "train", "optimizer"):
            if name not in given:
                raise RecipeError(f"a Recipe needs {name!r}, which was not given.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_loss(self)
        for name in ("train", "validate"):
            if name == "train" or self.validate is not None:
                self.given[name] = _apart(name, getattr(self, name))
                object.__setattr__(self, name, self.given[name].dataset)
                _check_dataset(name, self.given[name].dataset)
        for name in ("optimizer", "weight", "collate", "augment", "scheduler", "parameters"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                hint = _HINTS.get(name, "")
                raise RecipeError(
                    f"Recipe.{name} is {a_or_an(given)}, but a function is wanted.{hint}"
                )
        _check_metrics(self.metrics)


_HINTS = {
    "optimizer": " Wrap it: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
    "scheduler": " Wrap it: scheduler=lambda optimizer: StepLR(optimizer, 10).",
}


def a_or_an(value: Any) -> str:
    """`an nn.Linear`, `a str`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    vowel = name[0].lower() in "aeiou" or (name[:2].isupper() and name[0] in "FHLMNRSX")
    return f"{'an' if vowel else 'a'} {name}"


_LOSSES = ("loss", "compute_loss", "batch_loss")


def _check_loss(recipe: Recipe) -> None:
    losses = [name for name in _LOSSES if getattr(recipe, name) is not None]
    if (recipe.embed is None) != (recipe.batch_loss is None):
        given, missing = ("embed", "batch_loss")[:: 1 if recipe.embed is not None else -1]
        raise RecipeError(
            f"Recipe.{given} was given without {missing}: the two belong together. "
            "embed(model, batch) gives (embeddings, targets) of a micro-batch, and "
            "batch_loss(model, embeddings, targets) is the loss of the whole global batch."
        )
    if len(losses) != 1:
        given = "none was" if not losses else f"{' and '.join(losses)} were"
        raise RecipeError(
            f"a Recipe needs one of loss, compute_loss, and embed with batch_loss; {given} given."
        )
    for name in (*_LOSSES, "embed"):
        given = getattr(recipe, name)
        if given is not None and not callable(given):
            raise RecipeError(f"Recipe.{name} is {a_or_an(given)}, but a function is wanted.")
    if recipe.loss is None and recipe.metrics:
        raise RecipeError(
            f"Recipe.metrics needs (outputs, target), which {losses[0]} does not give. "
            f"Leave metrics out, or give loss instead of {losses[0]}."
        )
    if recipe.batch_loss is not None and recipe.weight is not None:
        raise RecipeError(
            "Recipe.weight says how much of what a loss is a mean of a micro-batch holds, but "
            "batch_loss is of the whole global batch. Leave weight out."
        )


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise RecipeError(
            f"Recipe.metrics is {a_or_an(metrics)}, but a dict is wanted: "
            "name to metric(outputs, target)."
        )
    for name, metric in metrics.items():
        if not callable(metric):
            raise RecipeError(f"Recipe.metrics[{name!r}] is {a_or_an(metric)}, not a function.")
    if "loss" in metrics:
        raise RecipeError(
            "Recipe.metrics: the name 'loss' is taken by the loss itself. Choose another."
        )


def _apart(name: str, given: Any) -> LoaderParts:
    try:
        return unpack_loader(given)
    except ValueError as error:
        raise RecipeError(f"Recipe.{name} is a DataLoader that {error}.") from None


def _check_dataset(name: str, dataset: Any) -> None:
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if iterable or not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise RecipeError(
            f"Recipe.{name} is {a_or_an(dataset)}, but a map-style dataset is wanted: "
            "one with a length and dataset[i]."
        )
    if len(dataset) == 0:
        raise RecipeError(f"Recipe.{name} has length zero: there is nothing to learn from.")


@dataclass(frozen=True)
class Built:
    """A recipe with its model and optimizer made and checked, ready to train."""

    recipe: Recipe
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    parameters: list[nn.Parameter]
    """Those that need gradients, each once, in the order of their names in the model."""
    loaded: tuning.Loaded | None = None
    """The file that the model was taken from, if one was."""


def seed_everything(seed: int) -> None:
    """Set torch's, numpy's and Python's own generators from one number."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def set_generators(number: int) -> None:
    """The same for a pass or an update, of which a step has many, in a tenth of the time.

    `torch.manual_seed` makes a traceback for each sort of device that is absent.
    The generators of GPUs are set where they exist by now.
    """
    generators.seed_all(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `file.py:function` names.

    Raises:
        RecipeError: no such file or function, or importing the file failed.
    """
    file, _, name = reference.rpartition(":")
    if name == "__main__":
        raise RecipeError(f"{file} is a script with a loop of its own, and a recipe is wanted.")
    module = load_module(Path(file))
    function = getattr(module, name, None)
    if function is None:
        public = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise RecipeError(f"{file} has no function {name!r}. {near_miss(name, public)}")
    if not callable(function):
        raise RecipeError(f"{name!r} in {file} is {a_or_an(function)}, but a function is wanted.")
    return function  # type: ignore[no-any-return]


def load_module(path: Path) -> ModuleType:
    """Import a recipe's file under the name `instep_recipe`, once in a process."""
    loaded = sys.modules.get("instep_recipe")
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise RecipeError(f"there is no recipe file {str(path)!r}. {near_miss(path.name, beside)}")
    spec = importlib.util.spec_from_file_location("instep_recipe", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["instep_recipe"] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that a recipe can import what lies beside it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules["instep_recipe"]
        if isinstance(error, InstepError) or not isinstance(error, Exception):
            raise
        raise RecipeError(f"{path} cannot be imported: {sentence(error)}") from error
    return module


def call(function: Callable[..., Any], arguments: Mapping[str, Any], seed: int) -> Recipe:
    """Call a recipe function with the job's `[arguments]`, seeded.

    Raises:
        RecipeError: it does not take these arguments, or returns no Recipe.
    """
    _check_arguments(function, arguments)
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


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    name = _name(function)
    for argument in arguments:
        if argument not in parameters:
            raise RecipeError(
                f"[arguments] gives {argument!r}, which the recipe function {name!r} has not. "
                f"{near_miss(argument, parameters)}"
            )
    for p in parameters.values():
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in arguments:
            raise RecipeError(
                f"the recipe function {name!r} needs {p.name!r}: give it under [arguments], "
                f"or with --set arguments.{p.name}=..."
            )


def build(
    recipe: Recipe,
    seed: int,
    device: torch.device,
    steps: int,
    start: StartSpec | None = None,
    *,
    load: bool = True,
) -> Built:
    """Make and check the model on `device`, its optimizer and its scheduler.

    Args:
        recipe: says how.
        seed: of the job.
        device: where the model will be.
        steps: of the whole run, for a scheduler that wants to know.
        start: what the job starts from, freezes, and gives rates to.
        load: whether to load the file of `start`; not where a checkpoint has the values.

    Raises:
        RecipeError: the model has nothing to train, or a part is of the wrong type.
        SpecError: `start` does not fit the recipe.
        CheckpointError: the file of `start` does not fit the model.
    """
    start = start or StartSpec()
    model = recipe.model
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise RecipeError(f"Recipe.model is {a_or_an(model)}, but an nn.Module is wanted.")
        seed_everything(seed)
        model = model()
        if not isinstance(model, nn.Module):
            raise RecipeError(
                f"Recipe.model() returned {a_or_an(model)}, but an nn.Module is wanted."
            )
    _check_parameters(model)
    loaded = tuning.begin(start, model, load=load)
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.to(device)
    given = _for_optimizer(recipe, start, model, parameters)
    optimizer = _made("optimizer", recipe.optimizer, given)
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(
            f"Recipe.optimizer() returned {a_or_an(optimizer)}, "
            "but a torch.optim.Optimizer is wanted."
        )
    check_optimizer(optimizer, model)
    if start.learning_rates:
        tuning.check_rates(given, model, optimizer)
    scheduler = _scheduler(recipe, optimizer, steps) if recipe.scheduler else None
    if recipe.scheduler and not hasattr(scheduler, "step"):
        raise RecipeError(f"Recipe.scheduler() returned {a_or_an(scheduler)}, which has no step().")
    check_scheduler(scheduler)
    return Built(recipe, model, optimizer, scheduler, parameters, loaded)


def _for_optimizer(
    recipe: Recipe, start: StartSpec, model: nn.Module, parameters: list[nn.Parameter]
) -> Any:
    """What the recipe's function makes an optimizer of."""
    if recipe.parameters is None:
        return tuning.groups(start, model, parameters)
    if start.learning_rates:
        raise SpecError(
            "start.learning_rates makes groups of the parameters, and so does the recipe "
            "(Recipe.parameters). Leave one of them out."
        )
    return recipe.parameters(model)


def _check_parameters(model: nn.Module) -> None:
    every = list(model.parameters())
    if not every:
        raise RecipeError(f"the model ({type(model).__name__}) has no parameters to train.")
    if not any(p.requires_grad for p in every):
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
                f"the parameter {name!r} is complex ({parameter.dtype}), which cannot be agreed on."
            )


def _scheduler(recipe: Recipe, optimizer: Optimizer, steps: int) -> Any:
    assert recipe.scheduler is not None
    tells = "steps" in inspect.signature(recipe.scheduler).parameters
    return _made("scheduler", recipe.scheduler, *((optimizer, steps) if tells else (optimizer,)))


def _made(name: str, factory: Callable[..., Any], *given: Any) -> Any:
    try:
        return factory(*given)
    except InstepError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"Recipe.{name}() refused what it was given: {error}.") from error


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that moves what the workers would not agree on.

    Raises:
        RecipeError: it holds tensors that are not the model's parameters, or only a part of
            those that need gradients, or needs the loss to be evaluated several times a step.
    """
    own = {id(p) for p in model.parameters()}
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
            f"(the first has shape {strangers[0]}): workers agree only on the model. Make them "
            "part of it."
        )
    moved = {id(p) for p in held}
    still = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in moved]
    if still:
        total = sum(p.requires_grad for p in model.parameters())
        more = f" and {len(still) - 4} more" if len(still) > 4 else ""
        raise RecipeError(
            f"the optimizer holds {total - len(still)} of the model's {total} parameters that need "
            f"gradients: {', '.join(map(repr, sorted(still)[:4]))}{more} would never be trained. "
            "Give it all parameters; or freeze the others with requires_grad_(False), or "
            "start.freeze in the job."
        )
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
            f"{name}.step() wants {wanted!r}: instep calls step() with nothing, once a step, when "
            "the gradients of all workers are agreed on. An optimizer that evaluates the loss "
            f"itself cannot be used; if {name} wraps another one, give that."
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler that cannot be advanced once a step with nothing.

    Raises:
        RecipeError: it wants a metric, as `ReduceLROnPlateau` does, or something else.
    """
    wanted = _wanted_by(scheduler.step) if scheduler is not None else ""
    if wanted:
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        raise RecipeError(
            f"{type(scheduler).__name__}.step() wants {wanted!r}: a scheduler is advanced after "
            "every step with nothing. Use one that follows from the step, such as "
            "CosineAnnealingLR"
            + ("; a plateau can end the run instead, with stop.patience." if plateau else ".")
        )


def _wanted_by(step: Callable[..., Any]) -> str:
    """The first argument that `step` cannot be called without; empty if there is none."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # made in C: nothing is known of it
        return ""
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return next((p.name for p in named if p.default is p.empty), "")
