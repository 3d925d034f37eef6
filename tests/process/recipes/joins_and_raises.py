"""A script in which process 1 raises in the middle of a loop of its own."""

import sys

import tiny
import torch
from torch.nn import functional

import instep

if __name__ == "__main__":
    with instep.join(name="raises", runs=sys.argv[1], train={"global_batch": 16}) as session:
        made = tiny.recipe()
        model, optimizer, loader = session.prepare(
            made.model, torch.optim.SGD(made.model.parameters(), lr=0.1), made.train
        )
        for number, (inputs, target) in enumerate(loader, 1):
            if number == 9 and session.rank == 1:
                raise ValueError("process 1 has had enough")
            functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
