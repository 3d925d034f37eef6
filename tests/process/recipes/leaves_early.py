"""An own loop, to the bit, that process 1 leaves before its first step: folder of runs."""

import sys

import tiny
import torch
from torch.nn import functional

import instep

if __name__ == "__main__":
    train = {"global_batch": 16, "determinism": "bits"}
    with instep.join(name="early", runs=sys.argv[1], train=train, quiet=True) as session:
        made = tiny.recipe()
        model, optimizer, loader = session.prepare(
            made.model, torch.optim.SGD(made.model.parameters(), lr=0.1), made.train
        )
        for inputs, target in loader if session.rank == 0 else ():
            functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
