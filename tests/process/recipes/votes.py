"""A model with all sorts of parameters, trained by signs; samples may take a while."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SAMPLES = 149


def pairs() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 12, (SAMPLES, 3), generator=draw)
    return TensorDataset(rows, torch.randn(SAMPLES, 2, generator=draw))


class Slow:
    def __init__(self, dataset: Any, pause_s: float) -> None:
        self.dataset, self.pause_s = dataset, pause_s

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause_s)
        return self.dataset[index]


class Sorts(nn.Module):
    """Rows that few batches touch, shared, frozen and unused parameters, and what dropout draws."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6, sparse=sparse)
        self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 2))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        inner = self.again(torch.tanh(self.first(self.words(rows).mean(1))))
        output: Tensor = self.last(torch.tanh(self.frozen(inner)))
        return output


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, weight_decay=0.1)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)  # takes sparse gradients


def half_way_down(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def recipe(pause_s: float = 0.0, sparse: bool = False) -> instep.Recipe:
    return instep.Recipe(
        model=lambda: Sorts(sparse),
        loss=nn.MSELoss(),
        optimizer=plain_sgd if sparse else sgd,
        scheduler=half_way_down,
        train=Slow(pairs(), pause_s) if pause_s else pairs(),
    )
