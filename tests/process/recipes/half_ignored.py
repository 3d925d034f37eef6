"""A classifier of which every other sample has a target that does not count."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def recipe() -> instep.Recipe:
    inputs = torch.randn(64, 4)
    targets = torch.randint(3, (64,))
    targets[::2] = -100
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(inputs, targets),
    )
