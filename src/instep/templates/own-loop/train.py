"""A training loop of your own, on as many processes as there are.

    python train.py
    torchrun --nproc-per-node 2 train.py
    instep run train.py --workers 2

All three give the same result. Only under `instep run` is a worker that is lost replaced.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import instep

EPOCHS, BATCH, HELD_OUT = 10, 200, 500


def main() -> None:
    with instep.join(
        name="own-loop", train={"epochs": EPOCHS, "global_batch": BATCH}, quiet=True
    ) as session:
        model: nn.Module = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader, held_out = session.prepare(
            model,
            optimizer,
            DataLoader(spirals(2000), batch_size=BATCH, shuffle=True),
            DataLoader(spirals(HELD_OUT), batch_size=100),
        )

        for epoch in session.epochs():
            model.train()
            for inputs, target in loader:
                outputs = model(inputs.to(session.device))
                loss = F.cross_entropy(outputs, target.to(session.device))
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

            model.eval()
            right = 0
            for inputs, target in held_out:
                with torch.no_grad():
                    outputs = model(inputs.to(session.device))
                outputs, target = session.gather_for_metrics((outputs, target))
                right += int((outputs.argmax(dim=1) == target.to(session.device)).sum())
            session.validated(HELD_OUT, accuracy=right / HELD_OUT)
            if session.rank == 0:
                print(f"epoch {epoch + 1}  accuracy {right / HELD_OUT:.3f}")


def spirals(points: int) -> TensorDataset:
    """Points [points, 2] on two spirals, and which one each is on [points].

    Random numbers are the same in every process: `instep.join` seeds them.
    """
    which, turn = torch.randint(2, (points,)), torch.rand(points) * 2 * math.pi
    angle = turn + math.pi * which
    place: Tensor = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 3
    return TensorDataset(place + 0.05 * torch.randn(points, 2), which)


if __name__ == "__main__":
    main()
