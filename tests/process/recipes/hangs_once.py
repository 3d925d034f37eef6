"""A model whose forward pass does not end, in one process, once."""

import re
import time
from pathlib import Path

import tiny
from first_come import first
from torch import Tensor, nn

import instep

AFTER = 60
"""Forward passes before it hangs."""


def recipe(how: str, once: str) -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=Model(made.model, how, Path(once)),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
    )


class Model(nn.Module):
    def __init__(self, inner: nn.Module, how: str, once: Path) -> None:
        super().__init__()
        self.inner, self.how, self.once, self.passes = inner, how, once, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        time.sleep(0.01)
        if self.passes > AFTER and first(self.once):
            {"loops": loops, "holds": holds}[self.how]()
        outputs: Tensor = self.inner(inputs)
        return outputs


def loops() -> None:
    count = 0
    while True:
        count += 1


def holds() -> None:
    """Native code that keeps the interpreter's lock, for hours."""
    re.match("(a+)+$", "a" * 60 + "b")
