"""Gives another number of samples in every process."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def recipe() -> instep.Recipe:
    samples = 40 + os.getpid() % 97
    return instep.Recipe(
        model=nn.Linear(3, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(torch.zeros(samples, 3), torch.zeros(samples, 1)),
    )
