"""A small perceptron whose samples take time, and on one worker more of it now and then.

The time is slept, not computed: four workers on two cores would slow each other. In every other
period nobody is slow, so that one run has what it is compared with.
"""

import time
from pathlib import Path

import torch
from one_is_slow import first
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

PERIOD_S = 5.0
"""Of Unix time."""


def is_slow(moment: float) -> bool:
    """Whether somebody may be slow in the period of a moment."""
    return moment // PERIOD_S % 2 == 0


class Slow(nn.Module):
    """Sleeps for each sample that it is trained on, and longer in a part of every other period."""

    def __init__(self, sample_s: float, times: float, part: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        self.sample_s, self.times, self.part = sample_s, times, part

    def forward(self, inputs: Tensor) -> Tensor:
        now = time.time()
        slow = is_slow(now) and now % PERIOD_S < self.part * PERIOD_S
        time.sleep(self.sample_s * len(inputs) * (self.times if slow else 1.0))
        result: Tensor = self.layers(inputs)
        return result


def recipe(mark: str, sample_s: float, times: float, part: float) -> instep.Recipe:
    """`mark` is a file: who makes it is so many times slower in that part of the time."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4096, 32, generator=generator)
    return instep.Recipe(
        model=Slow(sample_s, times if first(Path(mark)) else 1.0, part),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        train=TensorDataset(inputs, inputs[:, :4].argmax(1)),
    )
