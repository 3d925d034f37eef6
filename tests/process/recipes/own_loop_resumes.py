"""A script with a loop of its own, to the bit: folder of runs, name, step to stop after."""

import sys

import tiny
import torch
from torch import nn
from torch.nn import functional

import instep

EPOCHS = 2

if __name__ == "__main__":
    runs, name, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
    train = {
        "global_batch": 16,
        "micro_batches": 4,
        "determinism": "bits",
        "stop_after_steps": stop,
    }
    with instep.join(name=name, runs=runs, seed=5, train=train, quiet=True, resume=True) as session:
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        model, optimizer, loader = session.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.01), tiny.recipe().train
        )
        for _ in range(session.step // 7, EPOCHS):
            for inputs, target in loader:
                loss = functional.cross_entropy(model(inputs), target)
                session.backward(loss)
                optimizer.step()
