"""Recipes whose samples belong to participants: labels, owners, and layers that normalise."""

import time
from pathlib import Path
from typing import Any

import torch
from averages import adam, half_way_down, model
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SAMPLES, VALIDATED = 149, 61


def data(samples: int = SAMPLES, seed: int = 3) -> TensorDataset:
    """Inputs, targets, and the class by which they are divided."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2].sin(), (inputs[:, 0] * 2).long() % 3)


def label(dataset: TensorDataset, index: int) -> int:
    return int(dataset.tensors[2][index])


def owner(dataset: TensorDataset, index: int) -> int:
    """The first has most, and the last the fewest."""
    return min(index * index * 7 // len(dataset) ** 2, 3)


def plain_model() -> nn.Module:
    """Nothing in it looks at its batch."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


class Slow:
    def __init__(self, dataset: TensorDataset, pause_s: float) -> None:
        self.dataset, self.pause_s, self.tensors = dataset, pause_s, dataset.tensors

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause_s)
        return self.dataset[index]


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, target, _ = batch
    return nn.functional.mse_loss(model(inputs), target)


def moved(dataset: TensorDataset, index: int) -> int:
    return (owner(dataset, index) + 1) % 4


def theirs(
    pause_s: float = 0.0, wrong: str = "", moved_by: str = "", plain: bool = False
) -> instep.Recipe:
    owners: Any = {
        "few": [0, 1, 2],
        "strange": [4] * SAMPLES,
        "empty": [0, 1, 2] * 49 + [0, 1],
        "words": ["a"] * SAMPLES,
    }.get(wrong, moved if Path(moved_by).is_file() else owner)
    return instep.Recipe(
        model=plain_model if plain else model,
        compute_loss=loss,
        optimizer=adam,
        scheduler=half_way_down,
        train=Slow(data(), pause_s) if pause_s else data(),
        validate=data(VALIDATED, 4),
        owners=None if wrong == "none" else owners,
        labels=label,
    )
