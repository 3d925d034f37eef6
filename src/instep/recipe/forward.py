"""One forward pass of the user's model: from a batch to a loss, with checks of the result.

Workers and steps are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.data.weighted import without_weights
from instep.errors import RecipeError
from instep.parallel.global_batch.cached import CachedGradients, LastEmbedded, of_one_pass, probe
from instep.parallel.nested import on_tensors
from instep.recipe.losses import checked, weighed_loss_of, weighed_own
from instep.recipe.metrics import is_whole, number
from instep.recipe.outputs import predictor
from instep.recipe.recipe import Recipe
from instep.recipe.weights import DERIVED, WeightedLoss, as_weight, kept, weighing
from instep.words import a_or_an


class Found(NamedTuple):
    """The loss of a batch, and how much it counts."""

    loss: Tensor
    """The mean over the batch, a scalar that can be differentiated; its total at weight 0."""
    weight: float
    """How much the batch has of what the loss is a mean of; 0 or more."""

    @property
    def factor(self) -> float:
        """The loss times this is its total."""
        return self.weight or 1.0

    @property
    def counts(self) -> bool:
        """Whether it is a loss; if all is masked out, the weight is 0 and the loss 0 or NaN."""
        if self.weight:
            return True
        total = float(self.loss.detach())
        return math.isfinite(total) and total != 0.0


class Measured(NamedTuple):
    """Loss and metrics of one batch; those of the whole dataset get `outputs` and `targets`."""

    values: dict[str, float]
    """The loss as its total, the metrics as means."""
    weight: float
    """Of the loss; the metrics count by `samples`."""
    outputs: Any = None
    targets: Any = None
    samples: int = 0
    """That the batch has: those that were read, without what `collate` left out."""


class Losses(NamedTuple):
    """The recipe's loss function: one of the two is given."""

    loss: Callable[[Any, Any], Any] | None
    compute_loss: Callable[[nn.Module, Any], Any] | None


class Forward:
    """From a batch to a loss.

    Args:
        recipe: has the loss functions.
        model: on `device`.
        precision: `float32`, or the type of autocast.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, device: torch.device, precision: str
    ) -> None:
        self.recipe, self.model, self.device = recipe, model, device
        self.precision = precision
        for loss in (recipe.loss, recipe.compute_loss, recipe.batch_loss):
            if isinstance(loss, nn.Module):
                loss.to(device)  # the weights of classes, say
        self.losses = Losses(recipe.loss, recipe.compute_loss)
        self._named = "compute_loss"
        if recipe.embed is not None and recipe.batch_loss is not None:
            self.losses = Losses(None, of_one_pass(recipe.embed, recipe.batch_loss))
            self._named = "batch_loss"
        self._trained = [frozenset(turn.names(model)) for turn in recipe.turns]
        self.weighing = weighing(recipe.weight, recipe.loss, collates=recipe.collates)
        """How batches are weighed, as far as the recipe shows."""
        self._weigh = self.weighing.weigh
        self._each = 1.0
        self.derived = False
        """Whether it was found what the loss of a Hugging Face model is a mean of."""
        self.weighs_itself = False
        """Whether `compute_loss` has returned a `WeightedLoss`."""
        self.wide: torch.dtype | None = None
        """What floating-point tensors of batches become, if they have fewer bits."""
        self.trained: frozenset[str] | None = None
        """Names of the parameters that the loss is for; None for all."""
        self.embedded = LastEmbedded()
        """Embeddings and targets of a batch of the trial; of a recipe with `embed`."""
        self.take_turn(-1)
        self.run: Callable[..., Any] = _call
        """Calls a function that uses the model, with its arguments."""
        self.phase = "forward"
        """The present activity: `forward`, `loss` or a metric's name."""
        self.batches = 0
        """Batches begun so far, as a sign of progress."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the forward pass, as a context."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.precision))

    def take_turn(self, number: int) -> None:
        """From now on compute the loss of this turn, if the recipe has turns; -1 is the last."""
        if self.recipe.turns:
            turn = self.recipe.turns[number]
            self.losses, self.trained = Losses(None, turn.compute_loss), self._trained[number]
            self._named, self.weighs_itself = f"turns[{turn.name!r}].compute_loss", False

    def named(self, name: str) -> str:
        """The name of a loss in messages; that of a turn contains the turn's name."""
        return self._named if self.recipe.turns else name

    def derive(self, name: str, each: float = 1.0) -> None:
        """Weigh batches by one of `weights.DERIVED`; an empty name changes nothing.

        Args:
            name: of what the loss is a mean of.
            each: how many numbers the target of a sample has, where these are counted; so a batch
                from which nothing is missing weighs as many as it has samples.
        """
        self.derived = self.derived or bool(name)
        self._weigh = DERIVED[name] if name else self._weigh
        self._each = each if self.weighing.counts else 1.0

    def numbers_of_one(self, batch: Any, samples: int) -> float:
        """How many numbers the target of one sample has, by a batch; for `derive`."""
        if not self.weighing.counts:
            return 1.0
        before, self._each = self._each, 1.0
        try:
            return self._weight(batch, samples) / samples or 1.0
        finally:
            self._each = before

    @contextmanager
    def on(
        self,
        model: nn.Module,
        precision: str,
        losses: Losses | None = None,
        wide: torch.dtype | None = None,
    ) -> Iterator[None]:
        """In this context compute with another model, precision, losses and width of batches."""
        before = self.model, self.precision, self.losses, self.wide
        self.model, self.precision = model, precision
        self.losses, self.wide = losses or self.losses, wide or self.wide
        try:
            yield
        finally:
            self.model, self.precision, self.losses, self.wide = before

    def compute_with(self, model: nn.Module, losses: Losses) -> None:
        """Go on with another model and other losses, within `on`."""
        self.model, self.losses = model, losses

    @property
    def tried(self) -> Losses:
        """The losses to try, to see whether cutting a batch changes the result. A loss over the
        global batch is replaced by one that each embedding decides by itself."""
        embed = self.recipe.embed
        return self.losses if embed is None else Losses(None, probe(embed, self.embedded))

    def cached(
        self, go_back: Callable[[list[Tensor], list[Tensor]], None] | None = None
    ) -> CachedGradients:
        """One step of a recipe with `embed` and `batch_loss`; `go_back` as in `CachedGradients`."""
        embed, batch_loss = self.recipe.embed, self.recipe.batch_loss
        assert embed is not None, "a recipe without embeddings"
        assert batch_loss is not None, "a recipe without a loss of the global batch"

        def named(phase: str) -> None:
            self.phase = phase
            self.batches += 1

        def embedded(model: nn.Module, batch: Any) -> tuple[Any, Any]:
            named("embed")
            return embed(model, to_device(batch, self.device))

        def loss(model: nn.Module, embeddings: Any, targets: Any) -> Tensor:
            named("batch_loss")
            return checked(batch_loss(model, embeddings, targets), "batch_loss")

        return CachedGradients(self.model, embedded, loss, precision=self.autocast, go_back=go_back)

    def loss(
        self, batch: Any, samples: int, *, always: bool = False, plain: bool = False
    ) -> Found | None:
        """The mean loss of a batch and its weight; None if nothing in the batch counts.

        Args:
            batch: from the loader.
            samples: in the batch.
            always: compute it in any case, since other workers need what the model gives;
                `Found.counts` says whether there is a loss.
            plain: call the model as it is, and not by `run`.

        Raises:
            RecipeError: the batch is not (inputs, target), the loss not a scalar that can be
                trained on, or the weight not a number of 0 or more.
        """
        weight = self._weight(batch, samples)
        if not weight and not always:
            return None
        loss, own, _, _ = (_call if plain else self.run)(self._outputs, batch)
        if own is None and not weight:  # a mean over nothing
            loss = loss * 0.0
        found = Found(loss, weight if own is None else own)
        return found if always or found.counts else None

    def counts(self, batch: Any, samples: int) -> bool:
        """Whether a batch has any weight, as far as that is known before its pass."""
        return bool(self._weight(batch, samples))

    def _weight(self, batch: Any, samples: int) -> float:
        batch, weights = without_weights(batch)
        if weights is not None or self._weigh is None:  # of weights, the pass tells
            return float(samples)
        if self.losses.loss is not None:
            _pair(batch)
        return self._weigh(batch) / self._each

    def _outputs(self, batch: Any) -> tuple[Tensor, float | None, Any, Any]:
        self.phase, self.batches = "forward", self.batches + 1
        batch, weights = without_weights(to_device(batch, self.device))
        if self.wide is not None:
            batch = on_tensors(batch, partial(widened, wide=self.wide))
        with self.autocast():
            if (compute := self.losses.compute_loss) is not None:
                self.phase = self._named
                found = weighed_own(compute(self.model, batch), weights, self._named)
                if not isinstance(found, WeightedLoss):
                    return checked(found, self._named), None, None, None
                self.weighs_itself = True
                weight = as_weight(found.weight, "WeightedLoss.weight")
                total = checked(found.total, self._named)
                return total / (weight or 1.0), weight, None, None
            inputs, target = _pair(batch)
            outputs = self.model(inputs)
            self.phase = "loss"
            found, own = weighed_loss_of(self.losses.loss, outputs, target, weights)
            self.weighs_itself |= own is not None
            return checked(found, "loss"), own, outputs, target

    @torch.no_grad()
    def predicted(self, batch: Any) -> Any:
        """What the model gives for the inputs of a batch, in eval mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            with self.autocast():
                inputs, _ = _pair(to_device(batch, self.device))
                return self.model(inputs)
        finally:
            self.model.train(was_training)

    def _compared(self, batch: Any) -> tuple[Tensor, float | None, Any, Any]:
        """As `_outputs`, with what the metrics compare."""
        loss, own, outputs, target = self._outputs(batch)
        if self.recipe.targets is None:
            return loss, own, outputs, target
        batch = to_device(batch, self.device)
        if self.recipe.predict is not None or self.losses.loss is None:
            self.phase = "predict"
            with torch.no_grad(), self.autocast():
                outputs = predictor(self.recipe)(self.model, batch)
        self.phase = "targets"
        return loss, own, outputs, self.recipe.targets(batch)

    def measure(self, batch: Any, samples: int) -> Measured | None:
        """Loss and metrics of one batch, in the order of the recipe; None if another process of
        this replica has them."""
        weight = self._weight(batch, samples)
        with torch.set_grad_enabled(self.losses.compute_loss is not None):  # it may need some
            given = self.run(self._compared, batch)
        if given is None:
            return None
        loss, own, outputs, target = given
        found = Found(loss.detach(), weight if own is None else own)
        values = {"loss": float(found.loss) * found.factor if found.counts else 0.0}
        for name, metric in self.recipe.metrics.items():
            if not is_whole(metric):
                self.phase = f"metric {name}"
                values[name] = number(metric(outputs, target), name)
        return Measured(values, found.weight, outputs, target, self.kept(batch, samples))

    def kept(self, batch: Any, samples: int) -> int:
        """How many of the samples that it was given the user's `collate` has kept in a batch."""
        return kept(without_weights(batch)[0], samples) if self.recipe.collates else samples


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        named = isinstance(batch, Mapping)
        size = f" of {len(batch)}" if named or isinstance(batch, (tuple, list)) else ""
        own = "model(**batch).loss" if named and "labels" in batch else "..."  # of transformers
        raise RecipeError(
            f"a batch is {a_or_an(batch)}{size}, but (inputs, target) is wanted. For other batches "
            f"give compute_loss=lambda model, batch: {own} instead of loss."
        )
    return batch[0], batch[1]


SHORT = {torch.bfloat16, torch.float16}
"""Types of 16 bits."""


def has_short(model: nn.Module) -> bool:
    """Whether a model has parameters of 16 bits."""
    return any(parameter.dtype in SHORT for parameter in model.parameters())


def widened(tensor: Tensor, wide: torch.dtype | None) -> Tensor:
    """A tensor of floating-point numbers in a type of more bits; others as they are."""
    return tensor.to(wide) if wide is not None and is_narrow(tensor, wide) else tensor


def is_narrow(tensor: Tensor, wide: torch.dtype) -> bool:
    """Whether it is a floating-point tensor of fewer bits."""
    return tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(wide).eps


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a nested batch on `device`; the rest as it is."""
    if device.type == "cpu":
        return batch
    return on_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
