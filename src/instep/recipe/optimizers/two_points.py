"""Optimizers that train at one point and give the result at another, as schedule-free ones do.

They have `train()` and `eval()`, which move the parameters from one to the other. Gradients are
taken at the first; what is validated, saved as the model and predicted with is the second. Who has
the parameters of a run is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.recipe.optimizers.combined import parts_of


class TwoPoints:
    """The parameters at both points.

    Args:
        optimizers: of a run.
        model: has the parameters.
    """

    def __init__(self, optimizers: Iterable[Optimizer], model: nn.Module) -> None:
        self._switched: list[Any] = [
            each for optimizer in optimizers for each in parts_of(optimizer) if switches(each)
        ]
        moved = {id(p) for each in self._switched for g in each.param_groups for p in g["params"]}
        self._parameters = {n: p for n, p in model.named_parameters() if id(p) in moved}
        self.at_result = False
        """Whether they are at the point of the result already: an own loop switches by itself."""

    def __bool__(self) -> bool:
        return bool(self._switched)

    @property
    def name(self) -> str:
        """The class of the first such optimizer."""
        return type(self._switched[0]).__name__

    def _at_result(self) -> bool:
        """Also where the optimizer says so itself, as one of `schedulefree` that was restored."""
        groups = (group for each in self._switched for group in each.param_groups)
        return self.at_result or any(group.get("train_mode") is False for group in groups)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """In this context the parameters are at the point of the result; afterwards they have the
        bits that they had: going back and forth would round."""
        if self._at_result():
            yield
            return
        before = {name: each.detach().clone() for name, each in self._parameters.items()}
        for each in self._switched:
            each.eval()
        try:
            yield
        finally:
            for each in self._switched:
                each.train()
            with torch.no_grad():
                for name, value in before.items():
                    self._parameters[name].copy_(value)

    def values(self) -> dict[str, Tensor]:
        """The parameters at the point of the result, by name."""
        with self.evaluated():
            return {name: each.detach().clone() for name, each in self._parameters.items()}


def switches(optimizer: Optimizer) -> bool:
    """Whether an optimizer has two points."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def begin(optimizer: Any) -> None:
    """Steps are taken at the first point."""
    for each in parts_of(optimizer):
        if switches(each):
            each.train()  # type: ignore[attr-defined]
