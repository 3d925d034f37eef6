"""The 1,797 handwritten digits that come with scikit-learn, divided among eight participants.

    instep run examples/12_federated/job.toml --workers 2

Each participant has mostly a few of the ten digits, which it alone reads: federated averaging.
Shows what a recipe says of its samples: by which label they are dealt.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, random_split

import instep

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError(
        "the digits come with scikit-learn: pip install 'instep[examples]'"
    ) from error


def recipe(lr: float = 0.1) -> instep.Recipe:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    every = TensorDataset(images, torch.tensor(digits.target))  # [1797, 1, 8, 8] and [1797]
    train, validate = random_split(every, [1500, 297])
    return instep.Recipe(
        model=nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        train=train,
        validate=validate,
        metrics={"accuracy": accuracy},
        labels=digit,
    )


def digit(dataset: Subset, index: int) -> int:
    """By which samples are dealt; called for `train` and for `validate`."""
    return int(dataset[index][1])


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
