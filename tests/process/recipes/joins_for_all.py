"""A script that trains every kind of model, one after the other, in a few processes.

Arguments: the folder of runs, and `key=value` for `[train]`. Where a run of a
kind is there already, it goes on. One kind is trained in "order" mode as well.
"""

import sys
from typing import Any

from kinds import KINDS, TRAIN

import instep


def train(kind: str, name: str, **settings: Any) -> None:
    section = {"epochs": 2, "global_batch": 24, "micro_batches": 6, **TRAIN.get(kind, {})}
    session = instep.join(
        KINDS[kind],
        name=name,
        runs=sys.argv[1],
        seed=5,
        train={**section, **settings},
        quiet=True,
        resume=True,
    )
    for _ in session.steps():
        pass


if __name__ == "__main__":
    given = {key: int(value) for key, value in (text.split("=") for text in sys.argv[2:])}
    for kind in KINDS:
        train(kind, kind, determinism="bits", **given)
    train("mlp", "mlp-in-order", **given)
