"""Prepared shards, of which each host has some in its folder `DISK`; it notes what it reads."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import parts
import torch
from torch import Tensor

import instep
from instep.data.sources import shards


def noted(seen: Path, sample: dict[str, object]) -> tuple[Tensor, Tensor]:
    """Note the first number of a sample, by which it is known."""
    x = sample["x"]
    assert isinstance(x, Tensor)
    with seen.open("a") as file:
        file.write(f"{float(x[0]).hex()}\n")
    return parts.pair(sample)


def recipe(folder: str, pause_s: float = 0.0, validate: str = "") -> instep.Recipe:
    disk = os.environ.get("DISK", "all")
    found = parts.recipe(folder, slow=disk, pause_s=pause_s)
    return instep.Recipe(
        model=parts.net,
        compute_loss=found.compute_loss,
        weight=found.weight,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        train=shards(Path(folder) / disk, transform=partial(noted, Path(folder) / f"{disk}.seen")),
        validate=shards(Path(folder) / validate / disk, transform=parts.pair) if validate else None,
    )
