"""A model of 2.2 MB, so that its gradients are worth a way over the hosts."""

import tiny
import torch
from torch import nn

import instep


def recipe() -> instep.Recipe:
    few = tiny.recipe()
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 55_000), nn.Tanh(), nn.Linear(55_000, 3)),
        loss=few.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        train=few.train,
    )
