"""A recipe, or a loop of one's own, for hosts that share no folder: case, step to stop after, and
perhaps seconds that a sample takes.

Each process works in a folder of its host; where the others are, the environment says.
"""

import json
import sys
from typing import Any

import slow_tiny
import tiny
import torch
from torch import nn
from torch.nn import functional

import instep

CASE, STOP = sys.argv[1], int(sys.argv[2])
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
EPOCHS = 4
TRAIN = {
    "epochs": EPOCHS,
    "global_batch": 16,
    "micro_batches": 4,
    "determinism": "bits",
    "threads": 1,
    "stop_after_steps": STOP,
}
JOB: dict[str, Any] = {
    "name": CASE,
    "seed": 5,
    "quiet": True,
    "resume": True,
    "train": TRAIN,
    "checkpoint": {"every": 4},
}
CODEC = {"sync": {"codec": "int8"}, "train": {**TRAIN, "determinism": "order"}}
PRIVATE = {"network": "private"}
SPLIT = {"mesh": {"shard": 2}}
CUT = {"mesh": {"tensor": 2}}


def train_a_recipe(**more: Any) -> instep.Session:
    """Train `tiny`, slowly."""
    job: dict[str, Any] = {**JOB, **more}
    session = instep.join(slow_tiny.recipe, arguments={"pause_s": PAUSE_S}, **job)
    print(json.dumps([step.number for step in session.steps()]))
    return session


def train_in_a_loop_of_its_own() -> instep.Session:
    """The layers see their batch, and draw."""
    train = {key: value for key, value in TRAIN.items() if key != "epochs"}
    with instep.join(**{**JOB, "train": train}) as session:
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        model, optimizer, loader = session.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.01), tiny.recipe().train
        )
        for _ in session.epochs(EPOCHS):
            for inputs, target in loader:
                session.backward(functional.cross_entropy(model(inputs), target))
                optimizer.step()
    return session


if __name__ == "__main__":
    cases = {"recipe": {}, "codec": CODEC, "split": SPLIT, "cut": CUT, "private": PRIVATE}
    session = train_in_a_loop_of_its_own() if CASE == "own" else train_a_recipe(**cases[CASE])
    assert (session.summary is not None) == (session.rank == 0)
    print(session.step)
