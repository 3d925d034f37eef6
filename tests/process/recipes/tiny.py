"""101 samples and a small perceptron: numbers that nothing divides."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


def recipe(lr: float = 0.1) -> instep.Recipe:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(138, 6, generator=generator)
    labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        train=TensorDataset(inputs[:101], labels[:101]),
        validate=TensorDataset(inputs[101:], labels[101:]),
        metrics={"accuracy": accuracy},
    )


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
