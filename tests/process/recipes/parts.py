"""A regression on prepared shards, of which each host has some: those in the folder `DISK`."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import instep
from instep.data.sources import shards

SAMPLES, SHARDS = 480, 24


def samples(count: int = SAMPLES) -> list[dict[str, object]]:
    """Arrays of one length, numbers, and text of several lengths."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=generator)
    targets = inputs.sin().cumsum(1)[:, 2]
    return [
        {"x": x.numpy(), "y": float(y), "text": "é" * (n % 5)}
        for n, (x, y) in enumerate(zip(inputs, targets, strict=True))
    ]


def pair(sample: dict[str, object]) -> tuple[Tensor, Tensor]:
    """Every column counts, so that one that came otherwise would be seen."""
    x, y, text = sample["x"], sample["y"], sample["text"]
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    assert isinstance(text, str)
    return x + len(text), y.float().view(1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def recipe(folder: str, source: str = "", slow: str = "", pause_s: float = 0.0) -> instep.Recipe:
    """Of what lies in the folder `DISK` of `folder`; a host of this name computes slowly."""
    disk = os.environ.get("DISK", "all")

    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(pause_s if disk == slow else 0.0)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return instep.Recipe(
        model=net,
        compute_loss=compute_loss,
        weight=lambda batch: len(batch[0]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        train=shards(Path(folder) / disk, transform=pair, source=source or None),
    )
