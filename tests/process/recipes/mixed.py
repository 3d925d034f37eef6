"""Three sources of samples that tell each other apart."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep

SIZES = {"web": 90, "books": 20, "code": 7}


def sources():
    g = torch.Generator().manual_seed(1)
    return {
        name: TensorDataset(
            torch.randn(size, 4, generator=g, dtype=torch.float64),
            torch.randn(size, generator=g, dtype=torch.float64) + number,
        )
        for number, (name, size) in enumerate(SIZES.items())
    }


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def recipe() -> instep.Recipe:
    return instep.Recipe(model=model(), optimizer=optimizer, train=sources(), loss=nn.MSELoss())
