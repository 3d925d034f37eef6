"""Models that are not a function of their samples and the key: what --check-determinism finds."""

import random
import time

import tiny
import torch
from torch import Tensor, nn

import instep


class Own(nn.Module):
    """Dropout from a generator that goes on from batch to batch."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.draw = draw

    def forward(self, inputs: Tensor) -> Tensor:
        keep = torch.tensor([self.draw.random() < 0.8 for _ in range(16)])
        return self.head(torch.tanh(self.body(inputs)) * keep)


class Backward(torch.autograd.Function):
    """A gradient that counts how often it was asked for."""

    calls = 0

    @staticmethod
    def forward(context: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        Backward.calls += 1
        return gradient * (1 + 1e-3 * Backward.calls)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(Backward.apply(torch.tanh(self.body(inputs))))


def recipe(model: str) -> instep.Recipe:
    made = {
        "seeded": lambda: Own(random.Random(3)),
        "unseeded": lambda: Own(random.Random(time.time_ns())),
        "counting": Counting,
    }
    base = tiny.recipe()
    return instep.Recipe(
        model=made[model](), loss=base.loss, optimizer=base.optimizer, train=base.train
    )
