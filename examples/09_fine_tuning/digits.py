"""A net that has learnt the digits 0 to 4 learns all ten, from four images of each.

    instep run examples/09_fine_tuning/pretrain.toml --name pretrained
    instep run examples/09_fine_tuning/job.toml

Shows how a run starts from the model of another: a file that matches in part, frozen layers,
and a smaller learning rate for the rest. All of this is in the job file.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError(
        "the digits come with scikit-learn: pip install 'instep[examples]'"
    ) from error


def pretrain() -> instep.Recipe:
    """All images of the digits 0 to 4."""
    images, labels = digits()
    few = labels < 5
    data = TensorDataset(images[few], labels[few])
    return trained_on(data, data, classes=5)


def fine_tune(each: int = 4) -> instep.Recipe:
    """All ten digits, `each` images of each for training, the others for validation."""
    images, labels = digits()
    first = torch.cat([torch.nonzero(labels == digit)[:each, 0] for digit in range(10)])
    others = torch.ones(len(labels), dtype=torch.bool)
    others[first] = False
    return trained_on(
        TensorDataset(images[first], labels[first]),
        TensorDataset(images[others], labels[others]),
        classes=10,
    )


def trained_on(
    train: TensorDataset, validate: TensorDataset, classes: int, lr: float = 3e-3
) -> instep.Recipe:
    return instep.Recipe(
        model=nn.Sequential(
            OrderedDict(
                early=block(1, 32),
                late=block(32, 64),
                head=nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, classes)),
            )
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=train,
        validate=validate,
        metrics={"accuracy": accuracy},
    )


def block(channels: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, outputs, 3, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def digits() -> tuple[Tensor, Tensor]:
    """[1797, 1, 8, 8] images from 0 to 1, and [1797] labels."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(found.target)


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
