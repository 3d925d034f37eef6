"""A loss that is finite, of which the gradient is not."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


def recipe() -> instep.Recipe:
    inputs = torch.linspace(1, 2, 40)[:, None]
    return instep.Recipe(
        model=nn.Linear(1, 1, bias=False),
        loss=steep,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        train=TensorDataset(inputs, inputs),
    )


def steep(outputs: Tensor, _: Tensor) -> Tensor:
    return (outputs - outputs.detach()).sqrt().mean()
