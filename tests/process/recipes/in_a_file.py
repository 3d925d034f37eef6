"""Samples that lie in one file, opened when the first is read; some of many ways to read them."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, get_worker_info

import instep

SAMPLES, VALUES = 96, 8
GIVEN = 80
"""Samples that the sampler of the `DataLoader` leaves."""


def write(path: Path, samples: int = SAMPLES) -> None:
    rows = np.random.default_rng(1).standard_normal((samples, VALUES)).astype(np.float32)
    path.write_bytes(rows.tobytes())


class InAFile:
    def __init__(self, path: str, how: str) -> None:
        self.path, self.how = path, how
        self.handle: Any = None
        self.own = np.random.default_rng()
        self.length = os.stat(path).st_size // (4 * VALUES)

    def __del__(self) -> None:
        if self.handle is not None:
            self.handle.close()

    def __len__(self) -> int:
        return self.length

    def open(self) -> None:
        self.handle = open(self.path, "rb")  # noqa: SIM115

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.handle is None:
            self.open()
        if self.how == "wrongly" and get_worker_info() is not None and index % 3 == 0:
            index = index + 1  # as with a handle that two processes move
        self.handle.seek(4 * VALUES * index)
        row = torch.frombuffer(bytearray(self.handle.read(4 * VALUES)), dtype=torch.float32)
        if self.how == "drawing" and index % 4 == 0:  # the first that is read may draw nothing
            row = row + random.random() + np.random.randn() + torch.randn(VALUES)
        if self.how == "its own draws":
            row = row + self.own.standard_normal()
        if self.how == "a few draws of its own" and index % 8 == 0:
            row = row + self.own.standard_normal()
        return row, row.sum().reshape(1)


def opened(number: int) -> None:
    """A `worker_init_fn`."""
    info = get_worker_info()
    assert info is not None
    info.dataset.open()


def recipe(path: str, how: str = "plainly", loader: int = -1, validate: str = "") -> instep.Recipe:
    train: Any = InAFile(path, how)
    if loader >= 0:
        sampler = SubsetRandomSampler(range(GIVEN))
        train = DataLoader(
            train, batch_size=5, num_workers=loader, sampler=sampler, worker_init_fn=opened
        )
    return instep.Recipe(
        model=nn.Linear(VALUES, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=train,
        validate=InAFile(validate or path, "plainly"),
    )
