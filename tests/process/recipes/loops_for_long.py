"""A script with a loop of its own that lasts until somebody ends it, and saves now and then."""

import sys

import slow_tiny
import torch
from torch import nn
from torch.nn import functional

import instep

if __name__ == "__main__":
    with instep.join(
        name="long",
        runs=sys.argv[1],
        train={"global_batch": 16},
        checkpoint={"every": 10},
        data={"loaders": 0},
        quiet=True,
    ) as session:
        mine = nn.Linear(6, 3)
        model, optimizer, loader = session.prepare(
            mine, torch.optim.SGD(mine.parameters(), lr=0.1), slow_tiny.recipe().train
        )
        while not session.stopped:
            for inputs, target in loader:
                loss = functional.cross_entropy(model(inputs), target)
                session.backward(loss)
                optimizer.step()
