"""A small model for many short runs that are broken on purpose; some of its steps take longer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import instep


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Random vectors; one in eight takes a few milliseconds to read."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % 8 == 0:
            time.sleep(0.004)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x[:4].square()


def recipe() -> instep.Recipe:
    """A stack of layers that every mesh can divide."""
    torch.manual_seed(3)
    layers: list[Any] = [
        nn.Linear(16, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    ]
    return instep.Recipe(
        model=nn.Sequential(*layers),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        train=Squares(),
    )
