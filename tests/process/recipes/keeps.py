"""An optimizer that counts in an attribute, and sequences of which one is longer than the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import instep


class Seldom(torch.optim.SGD):
    """Halves its learning rate in every fiftieth step."""

    number = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        if self.number % 50 == 0:
            self.param_groups[0]["lr"] *= 0.5
        super().step()


class Sequences(torch.utils.data.Dataset[Any]):
    """Of 4 numbers; one of 9."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        values = torch.linspace(0.1, 1.0, 9 if index == 36 else 4)[:, None] * (1 + index % 7)
        return values, values.square()


def padded(samples: list[Any]) -> Any:
    return tuple(
        nn.utils.rnn.pad_sequence(list(each), batch_first=True)
        for each in zip(*samples, strict=True)
    )


def recipe(seldom: bool = False, collates: bool = False) -> instep.Recipe:
    data = Sequences()
    if not collates:
        data = torch.utils.data.Subset(data, range(64, 128))  # type: ignore[assignment]
    kind = Seldom if seldom else torch.optim.SGD
    return instep.Recipe(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        train=data,
        optimizer=lambda parameters: kind(parameters, lr=1e-4),
        collate=padded if collates else None,
    )
