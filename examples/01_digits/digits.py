"""A small convolutional classifier on the 1,797 handwritten digits that come with scikit-learn.

    instep run examples/01_digits/job.toml --workers 2
    instep predict runs/digits --data examples/01_digits/digits.py:images

Shows the minimum that a recipe needs: a model, a loss, an optimizer, two datasets and a metric.
And a function that returns what is to be predicted.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import instep

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError(
        "the digits come with scikit-learn: pip install 'instep[examples]'"
    ) from error


def images() -> TensorDataset:
    return TensorDataset(torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16)


def recipe(lr: float = 2e-3) -> instep.Recipe:
    labels = torch.tensor(load_digits().target)
    every = TensorDataset(*images().tensors, labels)  # [1797, 1, 8, 8] and [1797]
    train, validate = random_split(every, [1500, 297])
    return instep.Recipe(
        model=nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=train,
        validate=validate,
        metrics={"accuracy": accuracy},
    )


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
