"""A body with running statistics, and a head of as many outputs as one likes."""

import tiny
import torch
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.neck = nn.Linear(16, 16)
        self.head = nn.Linear(16, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.neck(self.body(inputs)).tanh())
        return outputs


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=lambda: Net(3),
        loss=made.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
        train=made.train,
    )
