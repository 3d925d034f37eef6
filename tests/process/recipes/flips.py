"""As tiny.py, on a machine with a fault: one process of the run flips bits.

Which one is the first to make a file, so that whoever takes its place is sound.
"""

import os
from pathlib import Path

import tiny
import torch
from torch import Tensor, nn

import instep

BIT = 1 << 20
"""In the middle of a float32's fraction: nothing overflows, and no loss looks odd."""


def recipe(fault: str, file: str, passes: int) -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=Faulty(made.model, fault, Path(file), passes),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
        validate=made.validate,
        metrics=made.metrics,
    )


class Faulty(nn.Module):
    """Sound for its first `passes`, then faulty, in one process.

    Faults: `weight` flips a bit of a parameter once, `agreed` one of a gradient as the
    optimizer meets it, `stuck` has a bit of a gradient always set, `inverted` always flipped.
    """

    def __init__(self, inner: nn.Module, fault: str, file: Path, passes: int) -> None:
        super().__init__()
        self.inner = inner
        self.fault, self.file, self.passes = fault, file, passes
        self.begun = self.done = False
        self.weights = [next(inner.parameters())]  # in a list, so that it has no second name
        self.weights[0].register_hook(self.spoil)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes -= 1
        if self.training and not self.passes:
            self.begun = made_by_us(self.file)
        if self.begun and self.fault == "weight" and not self.done:
            self.done = True
            self.weights[0].data.view(torch.int32)[0, 0] ^= BIT
        return self.inner(inputs)

    def spoil(self, gradient: Tensor) -> Tensor:
        if not self.begun or self.fault not in ("stuck", "inverted"):
            return gradient
        spoilt = gradient.clone()
        bits = spoilt.view(torch.int32)
        bits[0, 0] = bits[0, 0] | BIT if self.fault == "stuck" else bits[0, 0] ^ BIT
        return spoilt


def made_by_us(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
