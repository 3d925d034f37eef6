"""A classification whose participants have data of their own, in float32."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep

SAMPLES = 120


def data(seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] * 2).long() % 3)


def recipe() -> instep.Recipe:
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        train=data(),
        validate=data(4),
        labels=lambda dataset, index: int(dataset.tensors[1][index]),
    )


def normalises() -> instep.Recipe:
    """BatchNorm keeps running statistics, which are averaged in the open."""
    found = recipe()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    return instep.Recipe(
        model=model,
        loss=found.loss,
        optimizer=found.optimizer,
        train=found.train,
        labels=found.labels,
    )
