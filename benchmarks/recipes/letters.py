"""Two models that learn to continue Python's own source: one of many bytes, one of much work.

The text is that of `examples/02_gpt`, and so is the small GPT. Both learn at a constant rate, so
that a run's loss does not depend on how long the run is.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import instep

EXAMPLE = Path(__file__).parents[2] / "examples" / "02_gpt" / "gpt.py"
WINDOWS, HELD_OUT = 200_000, 1024
"""Of training, and of validation."""


def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def windows(length: int, held_out: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows of bytes, each with the byte after it: of 19 files in 20, and of the others."""
    files = example().library()

    def drawn(some: list[Path], count: int) -> TensorDataset:
        text = np.frombuffer(b"".join(file.read_bytes() for file in some), np.uint8)
        first = np.random.default_rng(1).choice(len(text) - length, count, replace=False)
        rows = torch.from_numpy(text[first[:, None] + np.arange(length + 1)].copy())
        return TensorDataset(rows[:, :-1], rows[:, 1:])

    train = drawn([file for n, file in enumerate(files) if n % 20], WINDOWS)
    return train, drawn(files[::20], held_out)


class Wide(nn.Module):
    """4.2 million parameters that guess the next byte from the 16 before it."""

    length = 16

    def __init__(self, width: int = 1704) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Linear(32 * self.length, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 256),
        )

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.layers(self.byte(text.int()).flatten(1))
        return result


class Whole(nn.Module):
    """The GPT of the example with 0.43 million parameters."""

    length = 64

    def __init__(self) -> None:
        super().__init__()
        self.gpt = example().GPT(layers=2, width=128, length=self.length, dropout=0.0)

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.gpt(text.int())
        return result


def of_last(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target[:, -1].long())


def of_all(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten().long())


def recipe(model: str = "gpt", lr: float = 2e-3) -> instep.Recipe:
    models: dict[str, tuple[type[Wide] | type[Whole], Callable[..., Tensor], int]] = {
        "mlp": (Wide, of_last, HELD_OUT),
        "gpt": (Whole, of_all, HELD_OUT // 8),
    }
    kind, loss, held_out = models[model]
    train, validate = windows(kind.length, held_out)
    return instep.Recipe(
        model=kind(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True),
        train=train,
        validate=validate,
    )
