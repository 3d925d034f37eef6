"""A regression in float64: how far diabetes progressed in a year, from ten measurements.

    instep run examples/03_diabetes/job.toml

Shows another number type and metrics other than accuracy. The data of 442
patients come with scikit-learn (Efron et al. 2004, Least Angle Regression).
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import instep

try:
    from sklearn.datasets import load_diabetes
except ImportError as error:
    raise ImportError("the data come with scikit-learn: pip install 'instep[examples]'") from error


def recipe(hidden: int = 32, lr: float = 3e-3) -> instep.Recipe:
    table = load_diabetes()
    inputs = standardised(torch.tensor(table.data))  # [442, 10] float64
    target = standardised(torch.tensor(table.target)[:, None])  # [442, 1]
    train, validate = random_split(TensorDataset(inputs, target), [342, 100])
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(10, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double(),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1),
        train=train,
        validate=validate,
        metrics={"absolute_error": nn.L1Loss(), "explained": explained},
    )


def standardised(columns: Tensor) -> Tensor:
    return (columns - columns.mean(0)) / columns.std(0)


def explained(outputs: Tensor, target: Tensor) -> Tensor:
    """Explained share of the variance, R squared; the variance of all targets is 1."""
    return 1 - (outputs - target).square().mean()
