"""A small perceptron whose every process writes down when its parameters moved, and where.

Beside the run's own recorder: each move of the optimizer is a record of a file named after
the network namespace and the process. `read` gives them back.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import instep

SAMPLE_S = 0.004


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A sample takes a moment, so that most of a step is not the exchange."""

    def __init__(self, count: int, sample_s: float) -> None:
        self.sample_s = sample_s
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.labels = (self.inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.sample_s)
        return self.inputs[index], self.labels[index]


class Tells(torch.optim.SGD):
    """Each step leaves the moment, on the clock that all processes of this machine share."""

    folder = ""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        file = Path(self.folder) / f"{space_of('self')}-{os.getpid()}"
        with file.open("ab") as moves:
            moves.write(np.float64(time.monotonic()).tobytes())
        return super().step(closure)


def space_of(process: int | str) -> int:
    """The number of the network namespace that a process lives in."""
    return int(os.readlink(f"/proc/{process}/ns/net").split("[")[1].rstrip("]"))


def read(folder: Path) -> dict[int, np.ndarray]:
    """Network namespace to the moments of all moves in it, in order."""
    found: dict[int, list[np.ndarray]] = {}
    for file in folder.iterdir():
        found.setdefault(int(file.name.split("-")[0]), []).append(np.fromfile(file))
    return {space: np.sort(np.concatenate(moves)) for space, moves in found.items()}


def recipe(folder: str = "") -> instep.Recipe:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        Tells.folder = folder
        return (Tells if folder else torch.optim.SGD)(parameters, lr=0.1, momentum=0.9)

    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        train=Slow(101, SAMPLE_S if folder else 0.0),
    )
