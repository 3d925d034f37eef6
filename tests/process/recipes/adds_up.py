"""A loss whose gradient is the mean of the samples, whatever the parameters: steps add up."""

import torch
from slow_tiny import Slow
from torch import nn
from torch.utils.data import TensorDataset

import instep

SAMPLES = 101


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 700, generator=generator)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(700))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def recipe(pause_s: float = 0.0) -> instep.Recipe:
    return instep.Recipe(
        model=Product(),
        compute_loss=lambda model, batch: instep.WeightedLoss(model(batch[0]).sum(), len(batch[0])),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        train=Slow(TensorDataset(rows()), pause_s),
    )
