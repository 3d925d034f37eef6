"""A small classifier on samples that are large beside it, of the shards in the folder `DISK`."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

import instep
from instep.data.sources import shards

SIZE = 4096


def pair(sample: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return sample["x"], sample["y"]


def recipe(folder: str) -> instep.Recipe:
    return instep.Recipe(
        model=lambda: nn.Sequential(nn.AvgPool1d(64), nn.Linear(SIZE // 64, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        train=shards(Path(folder) / os.environ.get("DISK", "whole"), transform=pair),
    )
