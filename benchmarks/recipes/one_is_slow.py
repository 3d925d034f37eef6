"""A small perceptron whose samples take time, and more of it on the worker that comes first.

The time is slept, not computed: four workers on two cores would slow each
other, and nobody could say how fast one is.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


class Slow(nn.Module):
    """Sleeps for each sample that it is trained on."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        self.sample_s = sample_s

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(inputs))
        result: Tensor = self.layers(inputs)
        return result


def recipe(mark: str, sample_s: float, times: float) -> instep.Recipe:
    """`mark` is a file: who makes it is so many times slower, and leaves its process number."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4096, 32, generator=generator)
    return instep.Recipe(
        model=Slow(sample_s * (times if first(Path(mark)) else 1.0)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        train=TensorDataset(inputs, inputs[:, :4].argmax(1)),
    )


def first(mark: Path) -> bool:
    try:
        with mark.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
