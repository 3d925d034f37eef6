"""As tiny.py, but a sample takes long enough for somebody to kill the run."""

import time
from pathlib import Path
from typing import Any

import tiny

import instep


class Slow:
    """Has samples that take `pause_s`; a tenth of a second while there is the file `held`."""

    def __init__(self, dataset: Any, pause_s: float, held: str = "") -> None:
        self.dataset, self.pause_s, self.held = dataset, pause_s, held

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.1 if self.held and Path(self.held).exists() else self.pause_s)
        return self.dataset[index]


def recipe(pause_s: float = 0.004, held: str = "") -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=made.model,
        loss=made.loss,
        optimizer=made.optimizer,
        train=Slow(made.train, pause_s, held),
        validate=made.validate,
        metrics=made.metrics,
    )
