"""A model whose gradient is large and soon computed, so that a step is mostly exchange."""

import torch
from torch import Tensor, nn

import instep

WIDTH = 1024


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.tensor(float(index % 7))


def recipe(megabytes: int = 24) -> instep.Recipe:
    rows = megabytes * 250_000 // WIDTH
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(WIDTH, rows), nn.Tanh(), nn.Linear(rows, 1), nn.Flatten(0)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        train=Samples(),
    )
