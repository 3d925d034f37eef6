"""A model that predicts several things, with draws, and waits where it is asked to."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from first_come import first
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SAMPLES = 101


GATE = "PREDICT_GATE"
"""A file: while it is there, samples from 40 on have to wait. Who waits leaves a file with its
process id beside it."""


def recipe(hangs: str = "", shapes: str = "") -> instep.Recipe:
    """`hangs` is a file: who makes it, at sample 40, does not go on."""

    def predict(model: nn.Module, batch: Any) -> Any:
        (rows,) = batch
        sample = int((inputs()[:, 0] == rows[0, 0]).nonzero())
        if sample >= 40 and GATE in os.environ:
            wait_at(Path(os.environ[GATE]))
        if hangs and sample == 40 and first(Path(hangs)):
            while True:
                time.sleep(1.0)
        if shapes == "scalar":
            return rows.mean()
        if shapes == "lengths":
            return {"tokens": torch.zeros(len(rows), 3 + int(rows[0, 0] > 0))}
        assert not model.training
        assert not torch.is_grad_enabled()
        logits = model(rows)
        noise = torch.rand(len(rows), 2)
        return {"logits": logits, "more": (logits.argmax(1), noise.bfloat16())}

    return instep.Recipe(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(torch.randn(64, 6), torch.arange(64) % 3),
        predict=predict,
    )


def wait_at(gate: Path) -> None:
    waits = gate.with_suffix(f".{os.getpid()}")
    while gate.exists():
        waits.touch()
        time.sleep(0.01)
    waits.unlink(missing_ok=True)


def model() -> nn.Module:
    parts = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
    return nn.Sequential(*parts)


def plain() -> instep.Recipe:
    """The model on its inputs."""
    made = recipe()
    return instep.Recipe(model=model, loss=made.loss, optimizer=made.optimizer, train=made.train)


def inputs() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(9))


def data() -> TensorDataset:
    return TensorDataset(inputs())


def labelled() -> TensorDataset:
    return TensorDataset(inputs(), torch.arange(SAMPLES))


def unreadable() -> Any:
    return Unreadable()


def deadly() -> Any:
    return Unreadable(deadly=True)


def iterable() -> Any:
    return iter(range(3))


def empty() -> Any:
    return []


class Unreadable:
    def __init__(self, deadly: bool = False) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index in (16, 50) and self.deadly:
            import ctypes

            ctypes.string_at(0)
        if index in (16, 50):
            raise ValueError(f"no picture {index}")
        return inputs()[index]
