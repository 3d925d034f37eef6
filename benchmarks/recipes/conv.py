"""A convolutional net with BatchNorm on made-up colour images of 32 x 32."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def block(channels: int, filters: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(filters), nn.ReLU()]


def recipe(samples: int = 4000, width: int = 32) -> instep.Recipe:
    images = torch.randn(samples, 3, 32, 32)
    labels = torch.randint(10, (samples,))
    return instep.Recipe(
        model=nn.Sequential(
            *block(3, width, 1), *block(width, 2 * width, 2), *block(2 * width, 2 * width, 1),
            *block(2 * width, 4 * width, 2), *block(4 * width, 4 * width, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        train=TensorDataset(images, labels),
    )  # fmt: skip
