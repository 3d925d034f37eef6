"""Start training on this machine from Python, and use the result.

    python examples/06_python/train.py

The task: on which of two spirals is a point? The recipe must be in a file, because
each worker imports it from there; that is also why the last two lines are needed.
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


def recipe() -> instep.Recipe:
    return instep.Recipe(
        model=nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        train=spirals(2000),
        validate=spirals(500),
        metrics={"accuracy": accuracy},
    )


def spirals(points: int) -> TensorDataset:
    """Inputs [points, 2] and targets [points], 0 or 1; drawn from generators that instep seeds."""
    which, turn = torch.randint(2, (points,)), torch.rand(points) * 2 * math.pi
    angle = turn + math.pi * which
    place = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 3
    return TensorDataset(place + 0.05 * torch.randn(points, 2), which)


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()


def main() -> None:
    run = instep.train(recipe, workers=2, name="spirals", train={"epochs": 20, "global_batch": 200})
    print(f"accuracy {run.summary['metrics']['accuracy']:.3f}, see {run.path / 'report.html'}")


if __name__ == "__main__":
    main()
