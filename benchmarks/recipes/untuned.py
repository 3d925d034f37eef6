"""Ten small models on made-up data, of kinds on which no figure of `instep plan` was tuned.

A step of each takes 2 to 200 ms on one core; their gradients have 8 kB to 8 MB.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import instep


def classified(
    model: nn.Module,
    inputs: Tensor,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    classes: int = 10,
) -> instep.Recipe:
    labels = torch.randint(classes, (len(inputs),))
    return instep.Recipe(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        train=TensorDataset(inputs, labels),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Added(nn.Module):
    """Adds what layers make of an input to it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class Swapped(nn.Module):
    """Layers over the other of two dimensions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.transpose(1, 2)).transpose(1, 2)
        return result


class LastOf(nn.Module):
    """What a recurrent layer says after the last place of a sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0][:, -1]
        return result


class MeanOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Products(nn.Module):
    """Ratings as products of two tables' rows."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)

    def forward(self, pairs: Tensor) -> Tensor:
        result: Tensor = (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)
        return result


def logistic() -> instep.Recipe:
    return classified(nn.Linear(200, 10), torch.randn(20_000, 200), sgd)


def deep() -> instep.Recipe:
    """Forty thin layers: many small tensors."""
    width = 96
    layers = [Added(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(40)]
    model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))
    return classified(model, torch.randn(20_000, 64), adamw)


def residual() -> instep.Recipe:
    def block(width: int) -> nn.Module:
        conv = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        return Added(conv[0], nn.GroupNorm(4, width), nn.ReLU(), conv[1])

    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, padding=1), block(24), nn.Conv2d(24, 48, 3, 2, padding=1),
        block(48), block(48), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip
    return classified(model, torch.randn(4000, 3, 32, 32), sgd)


def depthwise() -> instep.Recipe:
    def block(width: int) -> nn.Module:
        deep = nn.Conv2d(width, width, 5, padding=2, groups=width)
        return Added(
            deep, nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1)
        )

    model = nn.Sequential(
        nn.Conv2d(3, 32, 4, 4), block(32), block(32), nn.Conv2d(32, 64, 2, 2), block(64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return classified(model, torch.randn(4000, 3, 32, 32), adamw)


def autoencoder() -> instep.Recipe:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, padding=1),
        nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, padding=1),
    )  # fmt: skip
    images = torch.randn(4000, 1, 28, 28)
    return instep.Recipe(
        model=model, loss=nn.MSELoss(), optimizer=adamw, train=TensorDataset(images, images)
    )


def dilated() -> instep.Recipe:
    """Convolutions over time, each over twice as long a stretch."""
    layers = [Added(nn.Conv1d(48, 48, 3, padding=2**n, dilation=2**n), nn.ReLU()) for n in range(6)]
    model = nn.Sequential(
        nn.Conv1d(4, 48, 1), *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(48, 10)
    )
    return classified(model, torch.randn(4000, 4, 256), adamw)


def gru() -> instep.Recipe:
    layer = nn.GRU(32, 192, batch_first=True)
    model = nn.Sequential(nn.Embedding(2000, 32), LastOf(layer), nn.Linear(192, 10))
    return classified(model, torch.randint(2000, (4000, 48)), adamw)


def encoder() -> instep.Recipe:
    """A transformer that reads both ways, with dropout, so that micro-batches are not merged."""
    layers = [
        nn.TransformerEncoderLayer(96, 4, 256, dropout=0.1, batch_first=True) for _ in range(2)
    ]
    model = nn.Sequential(nn.Embedding(1000, 96), *layers, MeanOf(), nn.Linear(96, 10))
    return classified(model, torch.randint(1000, (4000, 48)), adamw)


def mixer() -> instep.Recipe:
    def block(places: int, width: int) -> nn.Module:
        across = Swapped(nn.Linear(places, places), nn.GELU(), nn.Linear(places, places))
        along = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        return nn.Sequential(Added(nn.LayerNorm(width), across), Added(nn.LayerNorm(width), along))

    model = nn.Sequential(
        nn.Linear(48, 128), *(block(64, 128) for _ in range(3)), MeanOf(), nn.Linear(128, 10)
    )
    return classified(model, torch.randn(4000, 64, 48), adamw)


def factors() -> instep.Recipe:
    """Nearly all of it are two tables."""
    pairs = torch.stack([torch.randint(30_000, (20_000,)), torch.randint(10_000, (20_000,))], 1)
    return instep.Recipe(
        model=Products(30_000, 10_000, 48),
        loss=F.mse_loss,
        optimizer=sgd,
        train=TensorDataset(pairs, torch.randn(20_000)),
    )
