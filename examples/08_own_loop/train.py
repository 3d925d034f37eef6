"""Keep your own training loop; instep distributes data, sums gradients, saves and reports.

    python examples/08_own_loop/train.py
    torchrun --nproc-per-node 2 examples/08_own_loop/train.py

The task is that of 06_python, and so is the result.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

EPOCHS = 20


def main() -> None:
    train = {"epochs": EPOCHS, "global_batch": 200}
    with instep.join(name="spirals", train=train, quiet=True) as session:
        model: nn.Module = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        dataset, held_out = TensorDataset(*spirals(2000)), spirals(500)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = session.prepare(model, optimizer, dataset)

        for epoch in range(EPOCHS):
            for inputs, target in loader:  # this process's part of each global batch
                loss = F.cross_entropy(model(inputs.to(session.device)), target.to(session.device))
                session.backward(loss)
                optimizer.step()  # updates and commits, on all processes together

            own = slice(session.rank, None, session.size)
            inputs, target = (part[own].to(session.device) for part in held_out)
            right = (model(inputs).argmax(dim=1) == target).sum()
            right_of_all, all_of_them = session.sum(float(right), len(target))
            if session.rank == 0:
                print(f"epoch {epoch + 1}  accuracy {right_of_all / all_of_them:.3f}")


def spirals(points: int) -> tuple[Tensor, Tensor]:
    """Inputs [points, 2] and targets [points], 0 or 1; drawn from generators that instep seeds."""
    which, turn = torch.randint(2, (points,)), torch.rand(points) * 2 * math.pi
    angle = turn + math.pi * which
    place = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 3
    return place + 0.05 * torch.randn(points, 2), which


if __name__ == "__main__":
    main()
