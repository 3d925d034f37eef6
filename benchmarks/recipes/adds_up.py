"""A model whose parameters are the sum of all samples that it was trained on, exactly.

The loss is linear in the parameters, and SGD subtracts its gradient, the mean of the samples. These
are small whole numbers, so with parts of a power of two no sum is rounded, and none depends on the
order of updates: one that was lost or made twice shows.
"""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SAMPLES, WIDTH = 4096, 64


class Linear(nn.Linear):
    """Begins at zero, and sleeps for each sample that it is trained on."""

    def __init__(self, copies: int, sample_s: float) -> None:
        super().__init__(WIDTH, copies, bias=False)
        nn.init.zeros_(self.weight)
        self.sample_s = sample_s

    def forward(self, input: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(input))
        return super().forward(input)


def inputs() -> Tensor:
    """[SAMPLES, WIDTH], whole numbers."""
    drawn = torch.randint(-8, 9, (SAMPLES, WIDTH), generator=torch.Generator().manual_seed(3))
    return drawn.float()


def recipe(copies: int = 1, sample_s: float = 0.001) -> instep.Recipe:
    """`copies`: how many times the model has the sum, for its size."""
    samples = inputs()
    return instep.Recipe(
        model=Linear(copies, sample_s),
        loss=lambda outputs, _: outputs.sum(1).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        train=TensorDataset(samples, torch.zeros(SAMPLES)),
    )
