"""Targets of which some do not count, and models that can be told from one machine or not."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def recipe(ignored: int = 0, layer: str = "none") -> instep.Recipe:
    """The targets of the first `ignored` samples do not count."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 6, generator=generator)
    labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)
    labels[:ignored] = -100
    between = {"none": nn.Tanh(), "batch norm": nn.BatchNorm1d(16)}[layer]
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 16), between, nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(inputs, labels),
        validate=TensorDataset(inputs, labels),
    )
