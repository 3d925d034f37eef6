"""A recipe with one dataset, whose job says what of it is held out."""

from pathlib import Path
from typing import Any

import torch
from averages import adam
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import instep

SAMPLES = 150


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2].sin())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def apart(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def recipe(loader: bool = False, more_in: str = "") -> instep.Recipe:
    samples = SAMPLES + (10 if more_in and Path(more_in).exists() else 0)
    dataset: Any = data(samples)
    classes = [index * index % 3 for index in range(samples)]
    return instep.Recipe(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=adam,
        train=DataLoader(dataset, batch_size=20, shuffle=True) if loader else dataset,
        metrics={"apart": apart},
        labels=classes,
    )
