"""As tiny.py, but some samples cannot be read, or end who reads them.

And a model whose layers see their batch.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import nn

import instep


class Holes:
    def __init__(
        self, dataset: Any, bad: list[int], sample_s: float, deadly: list[int] | None = None
    ) -> None:
        self.dataset, self.bad, self.sample_s = dataset, set(bad), sample_s
        self.deadly = set(deadly or [])

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.sample_s)
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGSEGV)
        if index in self.bad:
            raise OSError(f"sector {index} is gone")
        return self.dataset[index]


def recipe(
    bad: list[int],
    bad_validation: list[int],
    norm: bool = False,
    sample_s: float = 0.0,
    deadly: list[int] | None = None,
    deadly_validation: list[int] | None = None,
) -> instep.Recipe:
    made = tiny.recipe()
    first = [nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh()]
    return instep.Recipe(
        model=nn.Sequential(*first, nn.Linear(16, 3)),
        loss=made.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=Holes(made.train, bad, sample_s, deadly),
        validate=Holes(made.validate, bad_validation, 0.0, deadly_validation),
        metrics=made.metrics,
    )


def recipe_of_file(bad: str) -> instep.Recipe:
    """Which cannot be read stands in a file: somebody may mend them."""
    return recipe(json.loads(Path(bad).read_text()), [])
