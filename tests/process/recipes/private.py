"""A small model on 96 points, one of which has a value that is found nowhere else."""

import struct

import torch
from torch import nn

import instep

PLANTED = struct.unpack("<f", struct.pack("<f", 1234.56789))[0]


def recipe() -> instep.Recipe:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, generator=generator)
    inputs[17, 3] = PLANTED
    targets = (inputs[:, 0] > 0).long()
    data = torch.utils.data.TensorDataset(inputs, targets)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        train=data,
    )
