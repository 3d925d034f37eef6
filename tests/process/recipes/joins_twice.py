"""A script for torchrun, Slurm or nobody: trains a recipe, and then in a loop of its own.

The model of that loop has layers which see their batch, and draw.
"""

import sys

import tiny
import torch
from torch import nn
from torch.nn import functional

import instep

RUNS = sys.argv[1]


def train_a_recipe() -> None:
    train = {"epochs": 2, "global_batch": 16}
    session = instep.join(tiny.recipe, name="recipe", runs=RUNS, seed=5, train=train, quiet=True)
    steps = list(session.steps())
    assert [step.number for step in steps] == list(range(1, 15))
    assert [step.number for step in steps if step.metrics] == [7, 14]
    assert (session.summary is not None) == (session.rank == 0)


def train_in_a_loop_of_its_own() -> None:
    train = {"global_batch": 17, "micro_batches": 4, "merge": "never"}
    with instep.join(name="own", runs=RUNS, seed=5, train=train, quiet=True) as session:
        mine = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        model, optimizer, loader = session.prepare(
            mine, torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9), tiny.recipe().train
        )
        for _ in range(2):
            for inputs, target in loader:
                loss = functional.cross_entropy(model(inputs), target)
                session.backward(loss)
                optimizer.step()
        assert session.sum(1.0, session.rank) == (session.size, sum(range(session.size)))


if __name__ == "__main__":
    train_a_recipe()
    train_in_a_loop_of_its_own()
