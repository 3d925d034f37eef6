"""A model whose forward pass, a dataset whose read, or a recipe that does not end, once."""

import copy
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import tiny
from first_come import first
from torch import Tensor, nn

import instep

AFTER = 60
"""Forward passes before it hangs."""


def recipe(how: str, once: str) -> instep.Recipe:
    """Where `how` is that of a recipe, the mark must be removed to have one hang."""
    made, mark = tiny.recipe(), Path(once)
    if how in ("is_stopped", "holds_early") and first(mark):
        holds() if how == "holds_early" else os.kill(os.getpid(), signal.SIGSTOP)
    return instep.Recipe(
        model=Model(made.model, how, mark),
        loss=made.loss,
        optimizer=made.optimizer,
        train=Data(made.train, mark) if how == "reads" else made.train,
    )


class Data:
    def __init__(self, inner: Any, once: Path) -> None:
        self.inner, self.once, self.reads = inner, once, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > AFTER * 8 and first(self.once):
            loops()
        return self.inner[index]


class Model(nn.Module):
    def __init__(self, inner: nn.Module, how: str, once: Path) -> None:
        super().__init__()
        self.inner, self.how, self.once, self.passes = inner, how, once, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Model":
        """A copy, on which things are tried before training, does not hang."""
        return Model(copy.deepcopy(self.inner, memo), "", self.once)

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        time.sleep(0.01)
        if self.how in HANGS and self.passes > AFTER and first(self.once):
            HANGS[self.how]()
        outputs: Tensor = self.inner(inputs)
        return outputs


def loops() -> None:
    count = 0
    while True:
        count += 1


def holds() -> None:
    """Native code that keeps the interpreter's lock, for hours."""
    re.match("(a+)+$", "a" * 60 + "b")


HANGS = {"loops": loops, "holds": holds}
