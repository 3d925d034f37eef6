"""Recipes whose local steps move all there is: buffers, moments, rates, and what dropout draws."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep
from instep.data.order import Order

SAMPLES = 149


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=generator).double())


class Slow:
    def __init__(self, dataset: Any, pause_s: float) -> None:
        self.dataset, self.pause_s = dataset, pause_s

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause_s)
        return self.dataset[index]


class Gaps:
    """All that one of two participants has in a round is lost, and a local step later."""

    def __init__(self) -> None:
        order = Order(SAMPLES, 0)
        lost = np.concatenate([order.indices(0, 0, 30), order.indices(1, 70, 80)])
        self.lost, self.dataset = frozenset(lost.tolist()), pairs()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index in self.lost:
            raise OSError("gone")
        return self.dataset[index]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Linear(16, 2),
    ).double()


class Sorts(nn.Module):
    """Parameters that are shared, frozen and never used, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.norm(self.again(torch.tanh(self.first(inputs))))
        output: Tensor = self.last(torch.tanh(self.frozen(inner)))
        return output


def sorts() -> nn.Module:
    return Sorts().double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def half_way_down(optimizer: torch.optim.Optimizer) -> Any:
    """Multiplies what is there, so that it matters from which rate it begins."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def all_moves(pause_s: float = 0.0, gaps: bool = False) -> instep.Recipe:
    return instep.Recipe(
        model=model,
        loss=nn.MSELoss(),
        optimizer=adam,
        scheduler=half_way_down,
        train=Gaps() if gaps else Slow(pairs(), pause_s) if pause_s else pairs(),
    )


def all_sorts(pause_s: float = 0.0) -> instep.Recipe:
    return instep.Recipe(
        model=sorts,
        loss=nn.MSELoss(),
        optimizer=adam,
        scheduler=half_way_down,
        train=Slow(pairs(), pause_s) if pause_s else pairs(),
    )


def classes(pause_s: float = 0.0) -> instep.Recipe:
    """In float32, with a validation set; what is right follows from the inputs."""
    inputs, target = (tensor.float() for tensor in pairs().tensors)
    data = TensorDataset(inputs, (target.sum(1) > 0).long())
    return instep.Recipe(
        model=lambda: nn.Sequential(nn.Linear(6, 128), nn.BatchNorm1d(128), nn.Linear(128, 2)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train=Slow(data, pause_s) if pause_s else data,
        validate=data,
    )


def no_bias(pause_s: float = 0.0) -> instep.Recipe:
    """The same without a bias before the normalization, whose gradient is rounding."""

    def model() -> nn.Module:
        first = nn.Linear(6, 128, bias=False)
        return nn.Sequential(first, nn.BatchNorm1d(128), nn.Linear(128, 2))

    return replace(classes(pause_s), model=model)


def weighed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> instep.WeightedLoss:
    """A mean over weights that differ much from sample to sample."""
    inputs, target = batch
    weights = inputs[:, 0].abs()
    each = (model(inputs) - target).square().mean(1)
    return instep.WeightedLoss((each * weights).sum(), weights.sum())


def plain_sgd() -> instep.Recipe:
    return instep.Recipe(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double(),
        compute_loss=weighed,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=pairs(),
    )


class Dies:
    """The loss, which notes down each forward pass: who ran it, and the seed of what it draws.

    Of one seed it kills its process, once: as soon as others have noted down what it waits for.
    """

    def __init__(self, notes: str, dies_at: int, waits_for: list[int]) -> None:
        self.notes, self.dies_at, self.waits_for = Path(notes), dies_at, set(waits_for)

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        seed = torch.initial_seed()
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {seed}\n")
        if seed == self.dies_at and self.seeds().count(seed) == 1:
            while not self.waits_for <= set(self.seeds()):
                time.sleep(0.01)  # between two looks
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(outputs, target)

    def seeds(self) -> list[int]:
        return [int(line.split()[1]) for line in self.notes.read_text().splitlines()]


def kills_itself(notes: str, dies_at: int, waits_for: list[int]) -> instep.Recipe:
    return instep.Recipe(
        model=model,
        loss=Dies(notes, dies_at, waits_for),
        optimizer=adam,
        scheduler=half_way_down,
        train=pairs(),
    )
