"""A classifier of the 1,797 handwritten digits of scikit-learn that reveals hardly anything of any.

    instep run examples/15_private/job.toml --workers 2

Shows that a private recipe is an ordinary one: a small model, norms that look at one sample, and a
validation set that is not private. All else is in `[privacy]` of the job.
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


def recipe(lr: float = 0.02) -> instep.Recipe:
    images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
    every = TensorDataset(images, torch.tensor(load_digits().target))  # [1797, 64] and [1797]
    train, validate = random_split(every, [1500, 297])
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        train=train,
        validate=validate,
        metrics={"accuracy": accuracy},
    )


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
