"""Train in processes that torchrun, Slurm or MPI started, or in this process alone.

    python examples/07_torchrun/train.py
    torchrun --nproc-per-node 2 examples/07_torchrun/train.py
    srun --nodes 1 --ntasks 2 python examples/07_torchrun/train.py

On several hosts the folder of runs must be shared, and only trusted machines
may reach the network between them: add runs="/shared/runs", network="private"
to the call of join. The recipe is that of 06_python, and so is the result.
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
    train = {"epochs": 20, "global_batch": 200}
    session = instep.join(recipe, name="spirals", train=train, quiet=True)
    for step in session.steps():
        if step.metrics and session.rank == 0:
            print(f"step {step.number}  accuracy {step.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
