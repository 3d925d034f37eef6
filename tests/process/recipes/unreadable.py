"""As tiny.py, but some samples cannot be read; and a model whose layers see their batch."""

import json
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import nn

import instep


class Holes:
    def __init__(self, dataset: Any, bad: list[int], sample_s: float) -> None:
        self.dataset, self.bad, self.sample_s = dataset, set(bad), sample_s

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.sample_s)
        if index in self.bad:
            raise OSError(f"sector {index} is gone")
        return self.dataset[index]


def recipe(
    bad: list[int], bad_validation: list[int], norm: bool = False, sample_s: float = 0.0
) -> instep.Recipe:
    made = tiny.recipe()
    first = [nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh()]
    return instep.Recipe(
        model=nn.Sequential(*first, nn.Linear(16, 3)),
        loss=made.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=Holes(made.train, bad, sample_s),
        validate=Holes(made.validate, bad_validation, 0.0),
        metrics=made.metrics,
    )


def recipe_of_file(bad: str) -> instep.Recipe:
    """Which cannot be read stands in a file: somebody may mend them."""
    return recipe(json.loads(Path(bad).read_text()), [])
