"""Keep your own training loop; instep deals out the data, agrees on gradients, saves and reports.

    python examples/08_own_loop/train.py
    torchrun --nproc-per-node 2 examples/08_own_loop/train.py
    instep run examples/08_own_loop/train.py --workers 2

The task is that of 06_python, and so is the result. Under `instep run` a worker that is
killed is replaced, and what the script prints is in `logs/` of the run folder.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import instep


def main() -> None:
    train = {"epochs": 20, "global_batch": 200}
    with instep.join(name="spirals", train=train, quiet=True) as session:
        model: nn.Module = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader, held_out = session.prepare(
            model,
            optimizer,
            DataLoader(TensorDataset(*spirals(2000)), batch_size=200, shuffle=True),
            DataLoader(TensorDataset(*spirals(500)), batch_size=100),
        )

        for epoch in session.epochs():
            for inputs, target in loader:  # one micro-batch of this process's share of a step
                loss = F.cross_entropy(model(inputs.to(session.device)), target.to(session.device))
                session.backward(loss)  # at the last one the processes agree on the gradient
                optimizer.step()  # then it moves, and commits
                optimizer.zero_grad()

            right = 0
            for inputs, target in held_out:  # every sample once, over all processes
                with torch.no_grad():
                    outputs = model(inputs.to(session.device))
                outputs, target = session.gather_for_metrics((outputs, target))
                right += int((outputs.argmax(dim=1) == target.to(session.device)).sum())
            session.validated(500, accuracy=right / 500)
            if session.rank == 0:
                print(f"epoch {epoch + 1}  accuracy {right / 500:.3f}")


def spirals(points: int) -> tuple[Tensor, Tensor]:
    """Inputs [points, 2] and targets [points], 0 or 1; drawn from generators that instep seeds."""
    which, turn = torch.randint(2, (points,)), torch.rand(points) * 2 * math.pi
    angle = turn + math.pi * which
    place = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 3
    return place + 0.05 * torch.randn(points, 2), which


if __name__ == "__main__":
    main()
