"""The moving average of the parameters (`train.ema`), as `torch.optim.swa_utils` computes it.

It is part of the committed state: it moves with each commit, is the same on every worker, and in
every checkpoint. Way in: `Average`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """After the first commit the parameters; after each further one, `decay` times the average and
    `1 - decay` times the parameters.

    Args:
        model: has the parameters; those that need no gradient have no average.
        decay: above 0, below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """A step is committed."""
        if not self._average:
            self._average = {n: p.detach().clone() for n, p in self._parameters.items()}
            return
        average = [self._average[name] for name in self._parameters]
        torch._foreach_lerp_(average, list(self._parameters.values()), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In this context the model has the average as its parameters."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name in self._average:
            parameter = self._parameters[name]
            parameter.data, self._average[name] = self._average[name], parameter.data

    def state(self) -> dict[str, Tensor]:
        """The average by parameter; empty before the first commit."""
        return self._average

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._average = {
            name: parameter.detach().clone().copy_(state[name])
            for name, parameter in self._parameters.items()
            if name in state
        }
