"""As tiny.py, but who first computes with the last sample sleeps until the model is saved."""

import copy
import time
from pathlib import Path
from typing import Any

import tiny
from first_come import first
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


class Sleeps(nn.Module):
    """Says that it woke; `events` are those of the run, None where it does not sleep."""

    def __init__(self, inner: nn.Module, last: Tensor, once: Path, events: Path | None) -> None:
        super().__init__()
        self.inner, self.last, self.once, self.events = inner, last, once, events

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sleeps":
        """A copy, on which things are tried before training, does not sleep."""
        return Sleeps(copy.deepcopy(self.inner, memo), self.last, self.once, None)

    def forward(self, inputs: Tensor) -> Tensor:
        """As `tiny`."""
        if self.events and (inputs == self.last).all(1).any() and first(self.once):
            while "model_saved" not in self.events.read_text():
                time.sleep(0.05)
            self.once.write_text("woke")
        outputs: Tensor = self.inner(inputs)
        return outputs


def recipe(once: str, events: str) -> instep.Recipe:
    """Of `tiny`, without validation."""
    made = tiny.recipe()
    assert isinstance(made.model, nn.Module)
    assert isinstance(made.train, TensorDataset)
    return instep.Recipe(
        model=Sleeps(made.model, made.train.tensors[0][-1], Path(once), Path(events)),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
    )
