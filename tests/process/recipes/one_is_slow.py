"""As tiny.py, but a sample takes time, and several times as long on the worker that comes first."""

import time
from pathlib import Path
from typing import Any

import tiny
from first_come import first
from torch import Tensor, nn

import instep


class Slow(nn.Module):
    """Sleeps for each sample that it is trained on."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, inputs: Tensor) -> Any:
        if self.training:
            time.sleep(self.seconds * len(inputs))
        return self.inner(inputs)


def recipe(mark: str, sample_s: float = 0.001, times: float = 6.0) -> instep.Recipe:
    """`mark` is a file: who makes it is the slow one, and leaves its process number in it."""
    made = tiny.recipe()
    return instep.Recipe(
        model=Slow(made.model, sample_s * (times if first(Path(mark)) else 1.0)),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
        validate=made.validate,
        metrics=made.metrics,
    )
