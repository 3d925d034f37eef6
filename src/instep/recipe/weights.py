"""Weights of batches: how much each has of what the loss is a mean of.

A loss is a mean over something: samples, tokens, class weights. The gradient of a global batch is
the mean of the gradients of its micro-batches, weighted by how much of that each has. This file
finds the weights; the engine multiplies (`engine/engine.py`), and the trial tests whether
the weights are right (`worker/trial/sameness.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.errors import RecipeError
from instep.parallel.nested import tensors_in

Weigh = Callable[[Any], float]
"""From a batch, as the loader gave it, to its weight."""


@dataclass(frozen=True)
class WeightedLoss:
    """What `compute_loss` returns if its loss is a mean of something else than samples.

    The loss of a step is the sum of all `total` divided by the sum of all `weight`, over the
    whole global batch, however it is cut. The total of a batch of weight 0 counts too, unless it
    is 0 or not finite.

    Args:
        total: the loss summed over what is weighed, such as tokens; a scalar that can be
            differentiated. With `data.balance = "reweight"` that of each sample, [samples].
        weight: how much of that the batch has; 0 or more. With `reweight` of each sample.
    """

    total: Tensor
    weight: float | Tensor


class Weighing(NamedTuple):
    """How the batches of a recipe are weighed."""

    weigh: Weigh | None
    """None: by samples."""
    known: bool
    """Whether the loss is known to be a mean of that, or only assumed to be."""
    name: str
    """The name of the loss in messages."""
    counts: bool = False
    """Whether `weigh` counts the numbers of a target: how many one sample has is its unit."""


_BY_SAMPLES = (
    "L1Loss",
    "MSELoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BCELoss",
    "BCEWithLogitsLoss",
    "KLDivLoss",
    "PoissonNLLLoss",
    "SoftMarginLoss",
    "HingeEmbeddingLoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
)
"""Losses of torch whose mean weighs all samples of one shape equally."""

_BY_ROWS = ("MultiLabelMarginLoss", "MultiLabelSoftMarginLoss")
"""Those of them whose mean is over rows of the target, whatever number of classes these have."""

_BY_CLASSES = ("CrossEntropyLoss", "NLLLoss", "NLLLoss2d")
"""Losses of torch whose mean is over the weights of the classes of the targets."""

_FUNCTIONS = {
    functional.cross_entropy: "CrossEntropyLoss",
    functional.nll_loss: "NLLLoss",
    functional.mse_loss: "MSELoss",
    functional.l1_loss: "L1Loss",
    functional.smooth_l1_loss: "SmoothL1Loss",
    functional.huber_loss: "HuberLoss",
    functional.binary_cross_entropy: "BCELoss",
    functional.binary_cross_entropy_with_logits: "BCEWithLogitsLoss",
    functional.kl_div: "KLDivLoss",
    functional.soft_margin_loss: "SoftMarginLoss",
    functional.poisson_nll_loss: "PoissonNLLLoss",
}


class _TorchLoss(NamedTuple):
    kind: str
    settings: Mapping[str, Any]


def _of_torch(loss: Any) -> _TorchLoss | None:
    settings: dict[str, Any] = {}
    if isinstance(loss, functools.partial) and not loss.args:
        loss, settings = loss.func, dict(loss.keywords)
    if isinstance(loss, nn.Module):
        kind = type(loss).__name__
        own = type(loss) is not getattr(nn, kind, None)
        return None if own or settings else _TorchLoss(kind, vars(loss) | dict(loss._buffers))
    hashable = callable(loss) and type(loss).__hash__ is not None
    kind = _FUNCTIONS.get(loss, "") if hashable else ""
    return _TorchLoss(kind, settings) if kind else None


class TorchMean(NamedTuple):
    """Kind of mean that a loss of torch is."""

    is_mean: bool
    """Whether it is the mean of losses that each sample has by itself."""
    by_classes: bool
    """Whether the mean is over the weights of the classes of the targets."""
    classes: Tensor | None
    """[classes] these weights; None: 1 each."""
    ignored: int
    """The class of targets that do not count."""


def torch_loss_of(loss: Any) -> TorchMean | None:
    """Kind of mean that a loss is; None if it is none of torch's own."""
    found = _of_torch(loss)
    if found is None or not is_of_torch(loss):
        return None
    kind, settings = found
    known = kind in _BY_CLASSES or kind in _BY_SAMPLES
    mean = known and settings.get("reduction", "mean") == "mean"
    ignored = settings.get("ignore_index", -100)
    return TorchMean(mean, kind in _BY_CLASSES, settings.get("weight"), ignored)


def is_of_torch(loss: Any) -> bool:
    """Whether a loss is one of torch's own, and nothing of the user's is called with it."""
    if isinstance(loss, nn.Module):
        own = vars(loss)
        hooks = own["_forward_pre_hooks"] | own["_forward_hooks"] | own["_backward_hooks"]
        if hooks or "forward" in own:
            return False
    return _of_torch(loss) is not None


def weighing(weight: Weigh | None, loss: Any, *, collates: bool = False) -> Weighing:
    """How the batches of a recipe are weighed, as far as the recipe shows.

    Args:
        weight: `Recipe.weight`.
        loss: `Recipe.loss`; None if `compute_loss` is given.
        collates: whether the user's own code makes batches: it may leave samples out or pack
            them, so what a loss of torch is a mean of is counted in each batch.
    """
    if weight is not None:
        name = "compute_loss" if loss is None else "Recipe.loss"
        return Weighing(lambda batch: as_weight(weight(batch), "Recipe.weight"), True, name)
    if loss is None:
        return Weighing(None, False, "compute_loss")
    torch_loss = _of_torch(loss)
    if torch_loss is None:
        return Weighing(None, False, "Recipe.loss")
    kind, settings = torch_loss
    reduction = settings.get("reduction", "mean")
    if kind in _BY_CLASSES and reduction == "mean":
        classes, ignored = settings.get("weight"), settings.get("ignore_index", -100)
        return Weighing(lambda batch: class_weights(batch[1], classes, ignored), True, f"nn.{kind}")
    known = kind in _BY_SAMPLES and reduction in ("mean", "batchmean")
    if known and collates:
        rows = kind in _BY_ROWS or reduction == "batchmean"
        return Weighing(lambda batch: numbers_in(batch[1], rows), True, f"nn.{kind}", True)
    return Weighing(None, known, f"nn.{kind}")


def numbers_in(target: Any, rows: bool = False) -> float:
    """The numbers of a target, or its `rows`: what a loss of torch is a mean of.

    Raises:
        RecipeError: it is not a tensor.
    """
    if not isinstance(target, Tensor):
        raise RecipeError(
            f"the target of a batch is a {type(target).__name__}, but the loss wants a tensor."
        )
    return float(target.shape[0] if rows and target.dim() > 1 else 1 if rows else target.numel())


def kept(batch: Any, samples: int) -> int:
    """How many of a batch's samples a `collate` of the user's has kept, by the shape of the
    target, or of all tensors where it has none.

    Args:
        batch: as `collate` made it.
        samples: that `collate` was given; the answer where the shapes do not show it.
    """
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
    shapes = [each.shape for each in tensors_in(batch[1] if pair else batch) if each.dim()]
    rows = {shape[0] for shape in shapes}
    columns = {shape[1] if len(shape) > 1 else -1 for shape in shapes}
    if len(rows) != 1 or samples in rows or columns == {samples}:  # packed, all kept, or time-major
        return samples
    return min(samples, *rows)


def is_sum(loss: Any) -> bool:
    """Whether it is a loss of torch's with `reduction = "sum"`."""
    torch_loss = _of_torch(loss)
    return torch_loss is not None and torch_loss.settings.get("reduction", "mean") == "sum"


def sum_refused(how: str) -> RecipeError:
    """Return the error for a loss that is a sum over samples; `how` says by what it is known."""
    return RecipeError(
        f"{how}: it is a sum, and a sum over a global batch depends on its size. Divide "
        "by the batch size (reduction='mean'), or return "
        "instep.WeightedLoss(total, weight) from compute_loss."
    )


@torch.no_grad()
def class_weights(target: Any, weight: Tensor | None = None, ignored: int = -100) -> float:
    """The sum of the class weights of all targets that count: cross entropy is a mean over it.

    Args:
        target: any shape, int64: classes; or [samples, classes, ...] floating point:
            probabilities, of which each place counts 1 (as in torch).
        weight: [classes] floating point; 1 each if None.
        ignored: the class of targets that do not count.
    """
    if not isinstance(target, Tensor):
        raise RecipeError(
            f"the target of a batch is a {type(target).__name__}, but cross entropy wants a tensor."
        )
    if target.is_floating_point():
        return target.numel() / (target.shape[1] if target.dim() > 1 else target.numel() or 1)
    if weight is None and target.is_cpu:  # numpy takes half the time
        return float(np.count_nonzero(target.numpy() != ignored))
    counts = target != ignored
    if weight is None:
        return float(counts.sum())
    return float(weight.to(target.device, torch.float64)[target[counts]].sum())


def as_weight(value: Any, name: str) -> float:
    """A weight as a number.

    Raises:
        RecipeError: it is not a number, below 0, or not finite.
    """
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise RecipeError(
            f"{name} returned a {type(value).__name__}, but one number is wanted: how much of what "
            "the loss is a mean of is in the batch."
        ) from None
    if not (math.isfinite(number) and number >= 0):
        raise RecipeError(f"{name} returned {number}, but a number of 0 or more is wanted.")
    return number


# ---- models that compute their own loss (Hugging Face)

DERIVED: dict[str, Weigh] = {
    "next tokens": lambda batch: class_weights(batch["labels"][..., 1:]),
    "tokens": lambda batch: class_weights(batch["labels"]),
    "samples": lambda batch: float(len(batch["labels"])),
}
"""What the loss of a model with `labels` in its batches can be a mean of, by name."""


def derive(
    model: nn.Module, compute_loss: Callable[[nn.Module, Any], Any], batch: Any
) -> set[str] | None:
    """Which of `DERIVED` the loss of a Hugging Face model is a mean of, tried on one batch.

    The model's own loss is compared with cross entropy over its logits, shifted by one
    token and not, and with its mean over samples; and with what `compute_loss` gives.

    Args:
        model: is called with the batch's items by name; must draw the same each time.
        compute_loss: of the recipe.
        batch: on the model's device.

    Returns:
        Names from `DERIVED`; empty if the model or the loss is of another kind. None if this
        batch does not show it, because its loss is not finite.
    """
    if not _of_hugging_face(model) or not isinstance(batch, Mapping) or "labels" not in batch:
        return set()
    with torch.no_grad():
        output = model(**batch)
        given = compute_loss(model, batch)
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    labels = batch["labels"]
    if not all(isinstance(each, Tensor) for each in (given, loss, logits, labels)):
        return set()
    assert isinstance(logits, Tensor)
    assert isinstance(loss, Tensor)
    exact = logits.dtype
    logits, loss = logits.float(), loss.float()
    candidates: dict[str, Tensor] = {}
    if labels.is_floating_point():
        if labels.numel() == logits.numel():
            candidates["samples"] = functional.mse_loss(logits.flatten(), labels.float().flatten())
    elif logits.dim() == labels.dim() + 1 and logits.shape[:-1] == labels.shape:
        candidates["tokens"] = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        if labels.dim() == 2:
            candidates["next tokens"] = functional.cross_entropy(
                logits[:, :-1].flatten(0, -2), labels[:, 1:].flatten()
            )
    near = 1e-5 if torch.finfo(exact).eps < 1e-6 else 1e-2
    same = functools.partial(torch.allclose, rtol=near, atol=1e-6)
    if not bool(loss.isfinite()):
        return None
    if not same(given.float(), loss):
        return set()
    return {name for name, value in candidates.items() if same(value, loss)}


def _of_hugging_face(model: nn.Module) -> bool:
    """Whether the model, or one that it wraps, is one of the library `transformers`."""
    return any(
        base.__module__.startswith("transformers.")
        for module in model.modules()
        for base in type(module).__mro__
        if base.__name__ == "PreTrainedModel"
    )
