"""What a pair of model and loss is, and what is expected of a run that trains it.

A pair is made anew for every loop, plain or instep's, from the same seed and in the
type that is asked for. It knows nothing of loops, processes or distances.

To add one: a function in a file of `pairs/` that returns its `Parts`, under `@pair`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SAMPLES = 100
GLOBAL_BATCH = 12
"""Nine steps an epoch: the last has four samples, in two micro-batches."""
MICRO_BATCHES = 6
STEPS = 20
SEED = 5


@dataclass(frozen=True, kw_only=True)
class Same:
    """The verdict is yes, and so are the distances."""

    def __str__(self) -> str:
        return "same"


@dataclass(frozen=True, kw_only=True)
class Said:
    """Before its first step the run says what differs."""

    word: str
    """A regular expression that the verdict has to match, whatever its case."""
    alone: bool = False
    """Whether on one worker with one micro-batch too; else it is the same there."""

    def __str__(self) -> str:
        return "said"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A RecipeError before the first step."""

    word: str
    """A regular expression that the error has to match, whatever its case."""
    alone: bool = True
    """Whether it is refused on one worker with one micro-batch too; else it is the same there."""

    def __str__(self) -> str:
        return "refused"


@dataclass(frozen=True, kw_only=True)
class Honest:
    """The same, or said, or refused: nobody promises which, but it has to be one of them."""

    word: str
    """A regular expression that a verdict other than yes has to match, or the error."""

    def __str__(self) -> str:
        return "same or said"


Expected = Same | Said | Refused | Honest

SAME = Same()


def said(word: str, *, alone: bool = False) -> Said:
    """Said, with a word that must occur."""
    return Said(word=word, alone=alone)


def refused(word: str, *, alone: bool = True) -> Refused:
    """Refused, with a word that must occur."""
    return Refused(word=word, alone=alone)


def honest(word: str) -> Honest:
    """Whichever, with a word that must occur where it is not the same."""
    return Honest(word=word)


def samples_of(batch: Any) -> int:
    """How many samples lie in a batch: the length of its first tensor."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One pair, made: a model and what trains it."""

    model: nn.Module
    train: Sequence[Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9
    )
    loss: Callable[[Any, Any], Tensor] | None = None
    """Of (outputs, target), the mean that the plain loop trains on."""
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    """Of (model, batch), likewise."""
    collate: Callable[[list[Any]], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    parameters: Callable[[nn.Module], Any] | None = None
    of: Callable[[Any], float] = samples_of
    """How much of what the loss is a mean of a batch holds; for the plain loop only."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Parts of the Recipe that differ from those above, such as `weight`."""

    def recipe(self) -> dict[str, Any]:
        """What `instep.Recipe` is given."""
        names = (
            "model", "train", "optimizer", "loss", "compute_loss", "collate", "scheduler",
            "parameters",
        )  # fmt: skip
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**own, **self.given}

    def mean_loss(self, batch: Any) -> Tensor:
        """The loss of a batch, as any PyTorch loop computes it."""
        if self.compute_loss is not None:
            return self.compute_loss(self.model, batch)
        assert self.loss is not None
        inputs, target = batch
        return self.loss(self.model(inputs), target)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair of model and loss, and what is expected of it."""

    name: str
    build: Callable[[], Parts]
    expected: Expected
    draws: bool
    """Whether its passes draw random numbers: then the plain loop runs the job's micro-batches."""
    train: Mapping[str, Any]
    """Keys of the job's `[train]`."""
    needs: tuple[str, ...]
    """Modules that take long to import."""
    steps: int = STEPS

    def make(self, dtype: torch.dtype) -> Parts:
        """Model and data in `dtype`, from the same random numbers each time."""
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self.build()
        finally:
            torch.set_default_dtype(before)


PAIRS: dict[str, Pair] = {}
"""By name, in the order of the table."""


def pair(
    name: str,
    expected: Expected = SAME,
    *,
    draws: bool = False,
    train: Mapping[str, Any] | None = None,
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[[], Parts]], Callable[[], Parts]]:
    """Enter a function that makes a pair's parts under a name."""

    def enter(build: Callable[[], Parts]) -> Callable[[], Parts]:
        assert name not in PAIRS, f"two pairs are called {name!r}"
        PAIRS[name] = Pair(
            name=name,
            build=build,
            expected=expected,
            draws=draws,
            train=dict(train or {}),
            needs=needs,
        )
        return build

    return enter
