"""Metrics of a whole dataset: objects with `update`, `compute`, `reset`, as in torchmetrics.

They get the batches in the order of the dataset, on one worker. How the batches come there is not
known here. Way in: `WholeMetrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from instep.errors import RecipeError

_METHODS = ("update", "compute", "reset")


def is_whole(metric: Any) -> bool:
    """Whether a metric is one of the whole dataset, and not the mean of a function over batches."""
    methods = all(callable(getattr(metric, name, None)) for name in _METHODS)
    return methods and not isinstance(metric, (type, Mapping))


class WholeMetrics:
    """Those of a recipe, fed with all batches of a dataset.

    Args:
        metrics: of the recipe; those that are functions are left out.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = {name: each for name, each in metrics.items() if is_whole(each)}
        self.names = list(self._metrics)
        for metric in self._metrics.values():
            if hasattr(metric, "sync_on_compute"):
                metric.sync_on_compute = False  # all batches come to this process already

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        for metric in self._metrics.values():
            metric.update(outputs, targets)

    def compute(self) -> list[float]:
        """The value of each over the batches since `reset`.

        Raises:
            RecipeError: one is not one number.
        """
        return [number(metric.compute(), name) for name, metric in self._metrics.items()]

    def rehearse(self, outputs: Any, targets: Any) -> None:
        """Try it on one batch, to find a mistake before the first step.

        Raises:
            RecipeError: a value is not one number.
        """
        self.reset()
        self.update(outputs, targets)
        for name, metric in self._metrics.items():
            found: Any = 0.0
            with suppress(Exception):  # one batch may be too little for it
                found = metric.compute()
            number(found, name)
        self.reset()


def number(value: Any, name: str) -> float:
    """The value of a metric, as a number.

    Raises:
        RecipeError: it is something else.
    """
    if isinstance(value, Mapping):
        raise RecipeError(
            f"Recipe.metrics[{name!r}] returned a {type(value).__name__} of "
            f"{', '.join(map(repr, value))}, but one number is wanted. Give each as a metric "
            "of its own: a collection of torchmetrics as metrics={**collection}."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise RecipeError(
            f"Recipe.metrics[{name!r}] returned a tensor of shape {list(value.shape)}, "
            "but one number is wanted: the mean over the samples of the batch."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise RecipeError(
            f"Recipe.metrics[{name!r}] returned a {kind}, but one number is wanted."
        ) from None


def no_metrics_without_targets(given: str, metrics: Mapping[str, Any], targets: Any) -> None:
    """Refuse metrics of a recipe whose loss does not say what they are of.

    Raises:
        RecipeError: names what to give.
    """
    if metrics and targets is None:
        raise RecipeError(
            f"Recipe.metrics needs (outputs, target), which {given} does not give. Give "
            "predict=lambda model, batch: ... and targets=lambda batch: ..., or leave metrics out."
        )
