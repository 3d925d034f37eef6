"""A convolutional classifier on MNIST, from IDX files on your disk.

    instep run examples/04_mnist/job.toml --set arguments.data=DIR

DIR holds train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k
files, plain or with .gz. Fashion-MNIST and KMNIST have the same format.
Shows a data source and a required argument.
"""

import torch
from torch import Tensor, nn

import instep
from instep.data import sources


def recipe(data: str, lr: float = 2e-3) -> instep.Recipe:
    return instep.Recipe(
        model=nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2),  # [batch, 16, 12, 12]
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2),  # [batch, 32, 4, 4]
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=sources.mnist(data, train=True),
        validate=sources.mnist(data, train=False),
        metrics={"accuracy": accuracy},
    )


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
