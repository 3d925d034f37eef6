"""Tells four shapes apart: circles, squares, triangles and crosses, somewhere in a noisy image.

    instep run job.toml

The images are drawn here. For your own, put a folder for each class into `photos`, and write
`train=image_folder("photos")` with `from instep.data.sources import image_folder`.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SHAPES = ("circle", "square", "triangle", "cross")


def recipe(lr: float = 2e-3) -> instep.Recipe:
    return instep.Recipe(
        model=network(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=shapes(4000),
        validate=shapes(1000),
        metrics={"accuracy": accuracy},
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, len(SHAPES)),
    )


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()


def shapes(count: int) -> TensorDataset:
    """Images [count, 1, 32, 32] and the number of the shape in each [count].

    Random numbers are the same in every process: instep seeds them before it calls `recipe`.
    """
    kind = torch.randint(len(SHAPES), (count,))
    size = 5 + 5 * torch.rand(count, 1, 1)
    middle = 10 + 12 * torch.rand(count, 2, 1, 1)
    place = torch.arange(32.0)
    y, x = place[:, None] - middle[:, 0], place[None, :] - middle[:, 1]  # each [count, 32, 32]
    square = (x.abs() < size) & (y.abs() < size)
    inside = torch.stack(
        [
            x**2 + y**2 < size**2,
            square,
            square & (2 * x.abs() < y + size),
            square & ((x.abs() < size / 3) | (y.abs() < size / 3)),
        ]
    )
    chosen = inside[kind, torch.arange(count)].float()
    return TensorDataset((chosen + 0.3 * torch.randn(count, 32, 32))[:, None], kind)
