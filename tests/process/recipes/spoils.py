"""One sample is infinite: the loss of the third step, and all that comes of it, is no number."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep
from instep.data.order import Order

SAMPLES, BATCH, SEED = 40, 8, 0
MARKED = int(Order(SAMPLES, SEED).indices(0, 2 * BATCH, 2 * BATCH + 1)[0])


def recipe() -> instep.Recipe:
    inputs = torch.linspace(0, 1, SAMPLES)[:, None]
    targets = inputs.clone()
    targets[MARKED] = math.inf
    return instep.Recipe(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(inputs, targets),
    )
