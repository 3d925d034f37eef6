"""A loss whose gradient is the mean of the samples, whatever the parameters: steps add up."""

import os
import signal
from dataclasses import replace

import torch
from slow_tiny import Slow
from torch import nn
from torch.utils.data import TensorDataset

import instep

SAMPLES, EVEN, WIDTH, WIDE = 101, 96, 700, 50_000


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, WIDTH, generator=generator)


def whole_numbers(count: int) -> torch.Tensor:
    """Samples whose sums are exact, in any order."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-99, 100, (count, WIDTH), generator=generator).float()


def many_whole_numbers() -> torch.Tensor:
    """The same, of so many that servers share them out."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-99, 100, (EVEN, WIDE), generator=generator).float()


class Product(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def recipe(pause_s: float = 0.0) -> instep.Recipe:
    return of(rows(), pause_s)


def in_whole_numbers(pause_s: float = 0.0) -> instep.Recipe:
    return of(whole_numbers(EVEN), pause_s)


def in_many_whole_numbers(pause_s: float = 0.0) -> instep.Recipe:
    return of(many_whole_numbers(), pause_s)


def in_many_that_die(pause_s: float = 0.0) -> instep.Recipe:
    """The process that calls callbacks is killed in the first call of every third step."""
    return replace(in_many_whole_numbers(pause_s), callbacks=[Dies()])


class Dies(instep.Callback):
    def on_step_end(self, context: instep.CallbackContext) -> None:
        mark = context.run / f"died-{context.step}"
        if context.step % 3 == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def of(samples: torch.Tensor, pause_s: float) -> instep.Recipe:
    return instep.Recipe(
        model=Product(samples.shape[1]),
        compute_loss=lambda model, batch: instep.WeightedLoss(model(batch[0]).sum(), len(batch[0])),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        train=Slow(TensorDataset(samples), pause_s),
    )
