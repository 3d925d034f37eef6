"""A perceptron that learns noisy patterns, with something left to learn at the end."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep

SAMPLES, CLASSES, PIXELS = 3072, 10, 64


def recipe(lr: float = 0.05) -> instep.Recipe:
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randn(CLASSES, PIXELS, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    inputs = patterns[labels] + 3.0 * torch.randn(SAMPLES, PIXELS, generator=generator)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(PIXELS, 64), nn.Tanh(), nn.Linear(64, CLASSES)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        train=TensorDataset(inputs[:2048], labels[:2048]),
        validate=TensorDataset(inputs[2048:], labels[2048:]),
    )
