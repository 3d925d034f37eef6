"""As tiny.py, but a sample takes long enough for somebody to kill the run."""

import time
from typing import Any

import tiny

import instep


class Slow:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return self.dataset[index]


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    return instep.Recipe(
        model=made.model,
        loss=made.loss,
        optimizer=made.optimizer,
        train=Slow(made.train),
        validate=made.validate,
        metrics=made.metrics,
    )
