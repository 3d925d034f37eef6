"""A small MLP on made-up images of MNIST's size: a step of a few milliseconds."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def recipe(samples: int = 20_000, width: int = 256) -> instep.Recipe:
    images = torch.randn(samples, 784)
    labels = torch.randint(10, (samples,))
    return instep.Recipe(
        model=nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train=TensorDataset(images, labels),
    )  # fmt: skip
