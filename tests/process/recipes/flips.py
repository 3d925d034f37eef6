"""As tiny.py, on a machine with a fault: one process of the run flips bits.

Which one is the first to make a file, so that whoever takes its place is sound. Some
steps before, another may be lost in the same way.
"""

import os
import signal
from pathlib import Path
from typing import Any

import tiny
import torch
from first_come import first
from torch import Tensor, nn

import instep

BIT = 1 << 20
"""In the middle of a float32's fraction: nothing overflows, and no loss looks odd."""


def recipe(fault: str, file: str, steps: int, lost: int = 0) -> instep.Recipe:
    made = tiny.recipe()
    model = Faulty(made.model, fault, Path(file), steps, lost)
    return instep.Recipe(
        model=model,
        loss=made.loss,
        optimizer=lambda parameters: watched(made.optimizer(parameters), model),
        train=made.train,
        validate=made.validate,
        metrics=made.metrics,
    )


def watched(optimizer: Any, model: "Faulty") -> Any:
    optimizer.register_step_pre_hook(lambda *_: model.before_update())
    return optimizer


class Faulty(nn.Module):
    """Sound for its first `steps`, then faulty, in one process.

    Faults: `weight` flips a bit of a parameter once, `agreed` one of a gradient as the
    optimizer meets it, `stuck` has a bit of a gradient always set, `inverted` always flipped.
    """

    def __init__(self, inner: nn.Module, fault: str, file: Path, steps: int, lost: int) -> None:
        super().__init__()
        self.inner = inner
        self.fault, self.file, self.steps, self.lost = fault, file, steps, lost
        self.begun = self.done = False
        self.weights = [next(inner.parameters())]  # in a list, so that it has no second name
        self.weights[0].register_hook(self.spoil)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fault == "weight":
            self.flip_once(self.weights[0])
        return self.inner(inputs)

    def before_update(self) -> None:
        if self.fault == "agreed":
            self.flip_once(self.weights[0].grad)
        self.steps -= 1
        if self.lost and self.steps == self.lost and first(self.file.with_suffix(".lost")):
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.steps:
            self.begun = first(self.file)

    def flip_once(self, tensor: Any) -> None:
        if self.begun and not self.done:
            self.done = True
            tensor.data.view(torch.int32)[0, 0] ^= BIT

    def spoil(self, gradient: Tensor) -> Tensor:
        if not self.begun or self.fault not in ("stuck", "inverted"):
            return gradient
        spoilt = gradient.clone()
        bits = spoilt.view(torch.int32)
        bits[0, 0] = bits[0, 0] | BIT if self.fault == "stuck" else bits[0, 0] ^ BIT
        return spoilt
