"""As tiny.py, but a sample takes long enough for somebody to kill the run."""

import time
from typing import Any

import tiny

import instep


class Slow:
    def __init__(self, dataset: Any, pause_s: float) -> None:
        self.dataset, self.pause_s = dataset, pause_s

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause_s)
        return self.dataset[index]


def recipe(pause_s: float = 0.004) -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=made.model,
        loss=made.loss,
        optimizer=made.optimizer,
        train=Slow(made.train, pause_s),
        validate=made.validate,
        metrics=made.metrics,
    )
