"""A small perceptron whose samples take time, by the speed of the worker that computes them.

The time is slept, not computed: so two cores are enough for devices of several kinds, and everybody
can say how fast each is.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


class Paused(nn.Module):
    """Sleeps for each sample that it is trained on."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        self.sample_s = sample_s

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(inputs))
        result: Tensor = self.layers(inputs)
        return result


def recipe(places: str, speeds: list[float], sample_s: float) -> instep.Recipe:
    """In the folder `places` each process takes the first speed that is left."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4096, 32, generator=generator)
    return instep.Recipe(
        model=Paused(sample_s / speeds[place_in(Path(places), len(speeds))]),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        train=TensorDataset(inputs, inputs[:, :4].argmax(1)),
    )


def place_in(folder: Path, count: int) -> int:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        try:
            with (folder / str(number)).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            continue
        return number
    raise RuntimeError(f"more than {count} processes")
