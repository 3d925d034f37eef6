"""The same samples from one of several sources, with columns that splits and partitions go by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import instep
from instep.data.sources import image_folder, shards

COLUMNS = ("labels", "owners", "groups", "times")


def pair(sample: dict[str, Any]) -> tuple[Any, Any]:
    return sample["x"], sample["labels"]


def record(raw: dict[str, Any]) -> dict[str, Any]:
    """The map of a preparation."""
    x = raw["x"] if "x" in raw else [raw[f"x{number}"] for number in range(4)]
    return {"x": np.asarray(x, np.float32), **{name: int(raw[name]) for name in COLUMNS}}


def tensors(path: Path) -> torch.utils.data.Dataset[Any]:
    table = np.load(path / "table.npz")
    return torch.utils.data.TensorDataset(*(torch.from_numpy(table[n]) for n in ("x", "labels")))


READ: dict[str, Callable[[Path], Any]] = {
    "images": lambda path: image_folder(path / "images"),
    "tensors": tensors,
}
"""How the sources are read that are no shards."""


def recipe(source: str, path: str) -> instep.Recipe:
    folder, given = Path(path), dict[str, Any]()
    if source in READ:
        dataset, table = READ[source](folder), np.load(folder / "table.npz")
        given = {name: table[name] for name in COLUMNS}
    else:
        dataset = shards(folder / "shards", transform=pair)
    return instep.Recipe(
        model=nn.Sequential(nn.Flatten(), nn.Linear(dataset[0][0].numel(), 3)),
        train=dataset,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        **given,
    )
