"""What a recipe function returns: model, data, loss and optimizer, each checked by its type.

What these parts make, is checked in `build.py`. Way in: `Recipe`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.data.mixture import JoinedSources, are_sources
from instep.data.reading.batched import offers
from instep.data.reading.streams.mixed import JoinedStreams, are_streams
from instep.data.torch_loader import LoaderParts, check_dataset, unpack_loader
from instep.errors import InstepError, RecipeError, caught, near_miss, raise_all
from instep.recipe.callbacks import check_callbacks
from instep.recipe.metrics import is_whole, no_metrics_without_targets
from instep.words import a_or_an


class Turn(NamedTuple):
    """One of several updates in a step: a GAN's discriminator, or its generator."""

    name: str
    """Among those of the recipe: letters, digits and `_`."""

    parameters: Callable[[nn.Module], Iterable[nn.Parameter]]
    """From the model to the parameters that this turn trains; no other turn has any of them."""

    optimizer: Callable[[Any], Optimizer]
    """From these parameters to an optimizer."""

    compute_loss: Callable[[nn.Module, Any], Any]
    """`compute_loss(model, batch)`: a scalar or an `instep.WeightedLoss`. Only this turn's
    parameters get a gradient from it."""

    scheduler: Callable[..., Any] | None = None
    """From `(optimizer)`, or `(optimizer, steps)`, to a learning-rate scheduler."""

    def names(self, model: nn.Module) -> list[str]:
        """The names in the model of its parameters that need gradients.

        Raises:
            RecipeError: `parameters` returns something else than parameters of the model.
        """
        given = self.parameters(model)
        if isinstance(given, (Tensor, nn.Module)) or not isinstance(given, Iterable):
            raise RecipeError(
                f"turns[{self.name!r}].parameters returned {a_or_an(given)}, but the parameters of "
                "a part of the model are wanted: lambda model: model.generator.parameters()."
            )
        wanted = {id(parameter) for parameter in given}
        every = dict(model.named_parameters())
        if strangers := len(wanted - {id(parameter) for parameter in every.values()}):
            raise RecipeError(
                f"turns[{self.name!r}].parameters returned {strangers} that are not parameters of "
                "the model: only those are summed over the workers. Make them part of it."
            )
        return [n for n, p in every.items() if id(p) in wanted and p.requires_grad]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training that is not about machines."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it."""

    train: Any
    """Map-style dataset: `len(train)` samples, `train[i]` one of them, `(inputs, target)`; or an
    `IterableDataset`, which gives them one after the other; or a `DataLoader` of either. Or a dict
    of map-style datasets, or of streams, which `[[data.sources]]` mixes."""

    optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]] | None = None
    """From the parameters to an optimizer: `lambda p: torch.optim.AdamW(p, lr=1e-3)`. Or to a list
    of optimizers, each of some of the parameters (`parameters` says what the function is given)."""

    turns: Sequence[Turn] = ()
    """Several updates in each step, one after the other on the same batch, instead of `optimizer`
    and a loss: a list of `instep.Turn`."""

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
    """`weight(batch)`: how much a batch has of what the loss is a mean of, such as tokens that
    count; by default its samples. For a loss of torch it is known (class weights,
    `ignore_index`), and a `compute_loss` may return an `instep.WeightedLoss` instead."""

    validate: Any = None
    """Dataset to validate on; each sample counts once."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Name to `metric(outputs, target)`, the mean over the samples of a batch; or to an object with
    `update`, `compute` and `reset`, as torchmetrics has them, of the whole dataset."""

    targets: Callable[[Any], Any] | None = None
    """`targets(batch)`: what metrics compare with what `predict` gives; the target of (inputs,
    target) otherwise. Metrics need it where there is no `loss`."""

    collate: Callable[[list[Any]], Any] | None = None
    """From a list of samples to a batch; torch's default otherwise."""

    augment: Callable[[Any, torch.Generator], Any] | None = None
    """`augment(sample, generator)`: a training sample's random change, keyed by the sample."""

    scheduler: Callable[..., Any] | None = None
    """From `(optimizer)`, or `(optimizer, steps)` of the whole run, to a learning-rate
    scheduler, advanced after every step."""

    parameters: Callable[[nn.Module], Any] | None = None
    """What the optimizer is given, for parameter groups; all that need gradients otherwise."""

    owners: Sequence[int] | Callable[[Any, int], int] | None = None
    """With `sync.options.partition = "owner"`: which participant has a sample, from 0. A whole
    number for each training sample; or `owners(dataset, index)`, which also divides `validate`."""

    labels: Sequence[Any] | Callable[[Any, int], Any] | None = None
    """The class of a sample, for `data.split = "stratified"`: a value for each sample of `train`,
    or `labels(dataset, index)`, or the name of a column of `train`. With
    `sync.options.partition = "labels"` a whole number, given as `owners` are."""

    groups: Sequence[Any] | Callable[[Any, int], Any] | None = None
    """For `data.split = "group"`: what a sample is of, such as a patient; given as `labels`."""

    times: Sequence[Any] | Callable[[Any, int], Any] | None = None
    """For `data.split = "time"`: when a sample was, a number or a date; given as `labels`."""

    length: Sequence[int] | Callable[[Any, int], int] | str | None = None
    """For `train.tokens_per_batch`: how long a sample is, such as its tokens; given as `labels`."""

    fit: Callable[[Any, Any], None] | None = None
    """`fit(dataset, indices)`: learn something, such as a mean, from the samples to train on (an
    int64 array), and set it on the dataset or in a buffer. Called first in every process."""

    predict: Callable[[nn.Module, Any], Any] | None = None
    """`predict(model, batch)`: what `instep predict` writes, with a row for each sample of the
    batch: a tensor, or a tuple or dict of tensors; the model on its inputs otherwise."""

    callbacks: Sequence[Any] = ()
    """Objects with any of `on_step_end`, `on_evaluate`, `on_log` and `on_save`: an
    `instep.Callback`, or your own. Called on one worker, after committed steps."""

    given: dict[str, LoaderParts] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """How `train` and `validate` are read; a `DataLoader` in their place is taken apart."""

    def __new__(cls, **given: Any) -> Recipe:
        """Check the names of the parts.

        Raises:
            RecipeError: a Recipe has no part of that name, or a required one is missing.
        """
        raise_all(_of_names(given, [f.name for f in fields(cls) if f.init]))
        return super().__new__(cls)

    def with_data(self, given: Mapping[str, LoaderParts], **fields: Any) -> Recipe:
        """The recipe with other datasets, and other values of some fields."""
        other = object.__new__(type(self))
        data = {name: parts.dataset for name, parts in given.items()}
        vars(other).update(vars(self) | data | fields | {"given": dict(given)})
        return other

    @property
    def collates(self) -> bool:
        """Whether code of the user's makes batches: of fewer samples perhaps, or padded ones."""
        return self.collate is not None or any(
            given.collate is not None or offers(given.dataset, "batch_of")
            for given in self.given.values()
        )

    def __post_init__(self) -> None:
        raise_all(self._refusals())

    def _refusals(self) -> Iterator[InstepError]:
        yield from _of_turns(self) if self.turns else _of_losses(self)
        for name in ("train", "validate"):
            if name == "train" or self.validate is not None:
                yield from self._of_dataset(name)
        for name in _FUNCTIONS:
            given = getattr(self, name)
            missing = given is None and name == "optimizer" and not self.turns
            if missing or (given is not None and not callable(given)):
                hint = _HINTS.get(name, "")
                yield RecipeError(
                    f"Recipe.{name} is {a_or_an(given)}, but a function is wanted.{hint}"
                )
        yield from _of_metrics(self.metrics)
        yield from caught(lambda: check_callbacks(self.callbacks))

    def _of_dataset(self, name: str) -> Iterator[InstepError]:
        """Take a `DataLoader` apart, and refuse what is no dataset."""
        try:
            given = getattr(self, name)
            if name == "train" and are_sources(given):
                given = JoinedSources(given)
            elif name == "train" and are_streams(given):
                given = JoinedStreams(given)
            self.given[name] = unpack_loader(given)
        except ValueError as error:
            yield RecipeError(f"Recipe.{name} is a DataLoader that {error}.")
            return
        object.__setattr__(self, name, self.given[name].dataset)
        yield from caught(lambda: check_dataset(name, self.given[name].dataset))


def _of_names(given: Mapping[str, Any], parts: Collection[str]) -> Iterator[InstepError]:
    for name in given:
        if name not in parts:
            yield RecipeError(f"a Recipe has no {name!r}. {near_miss(name, parts)}")
    for name in ("model", "train", "optimizer"):
        if name not in given and not (name == "optimizer" and "turns" in given):
            yield RecipeError(f"a Recipe needs {name!r}, which was not given.")


_FUNCTIONS = (
    "optimizer",
    "weight",
    "collate",
    "augment",
    "fit",
    "scheduler",
    "parameters",
    "predict",
    "targets",
)
_HINTS = {
    "optimizer": " Wrap it: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
    "scheduler": " Wrap it: scheduler=lambda optimizer: StepLR(optimizer, 10).",
}


_LOSSES = ("loss", "compute_loss", "batch_loss")


def _of_losses(recipe: Recipe) -> Iterator[InstepError]:
    losses = [name for name in _LOSSES if getattr(recipe, name) is not None]
    if (recipe.embed is None) != (recipe.batch_loss is None):
        given, missing = ("embed", "batch_loss")[:: 1 if recipe.embed is not None else -1]
        yield RecipeError(
            f"Recipe.{given} was given without {missing}: the two belong together. "
            "embed(model, batch) gives (embeddings, targets) of a micro-batch, and "
            "batch_loss(model, embeddings, targets) is the loss of the whole global batch."
        )
    if len(losses) != 1:
        given = "none was" if not losses else f"{' and '.join(losses)} were"
        yield RecipeError(
            f"a Recipe needs one of loss, compute_loss, and embed with batch_loss; {given} given. "
            "For a model that computes its own loss, as those of transformers do: "
            "compute_loss=lambda model, batch: model(**batch).loss."
        )
    for name in (*_LOSSES, "embed"):
        given = getattr(recipe, name)
        if given is not None and not callable(given):
            yield RecipeError(f"Recipe.{name} is {a_or_an(given)}, but a function is wanted.")
    if recipe.loss is None and losses:
        of = losses[0]
        yield from caught(lambda: no_metrics_without_targets(of, recipe.metrics, recipe.targets))
    if recipe.batch_loss is not None and recipe.weight is not None:
        yield RecipeError(
            "Recipe.weight is of a micro-batch, but batch_loss is a loss over the whole global "
            "batch. Leave weight out."
        )


def _of_turns(recipe: Recipe) -> Iterator[InstepError]:
    turns = recipe.turns
    if not isinstance(turns, (list, tuple)) or not all(isinstance(each, Turn) for each in turns):
        yield RecipeError(
            f"Recipe.turns is {a_or_an(turns)}, but a list of instep.Turn is wanted: "
            "[instep.Turn('discriminator', ...), instep.Turn('generator', ...)]."
        )
        return
    for name in ("optimizer", "scheduler", "parameters", *_LOSSES, "embed"):
        if getattr(recipe, name) is not None:
            yield RecipeError(
                f"Recipe.turns and Recipe.{name} were given: each turn has its own optimizer and "
                f"compute_loss. Leave {name} out."
            )
    of = "the compute_loss of a turn"
    yield from caught(lambda: no_metrics_without_targets(of, recipe.metrics, recipe.targets))
    names = [turn.name for turn in turns]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9_]+", name):
            yield RecipeError(f"a turn's name is {name!r}, but letters, digits and _ are wanted.")
        if names.count(name) > 1:
            yield RecipeError(f"two turns are called {name!r}. Give each a name of its own.")
    for turn in turns:
        for name in ("parameters", "optimizer", "compute_loss", "scheduler"):
            given = getattr(turn, name)
            if not callable(given) and not (name == "scheduler" and given is None):
                yield RecipeError(
                    f"turns[{turn.name!r}].{name} is {a_or_an(given)}, but a function is wanted."
                )


def _of_metrics(metrics: Any) -> Iterator[InstepError]:
    if not isinstance(metrics, Mapping):
        yield RecipeError(
            f"Recipe.metrics is {a_or_an(metrics)}, but a dict is wanted: "
            "name to metric(outputs, target)."
        )
        return
    for name, metric in metrics.items():
        if not (callable(metric) or is_whole(metric)) or isinstance(metric, type):
            yield RecipeError(
                f"Recipe.metrics[{name!r}] is {a_or_an(metric)}, not a function, nor an object "
                "with update, compute and reset."
            )
    if "loss" in metrics:
        yield RecipeError(
            "Recipe.metrics: the name 'loss' is taken by the loss itself. Choose another."
        )
