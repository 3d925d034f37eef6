"""Models that a mesh splits: repeated blocks, dropout, what does not divide, what is frozen."""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import instep

SAMPLES, WIDTH, CLASSES = 90, 12, 3


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.outer(self.drop(torch.tanh(self.inner(x))))


class Net(nn.Module):
    """Its head has fewer rows than four ranks, one parameter has no dimension, one is frozen."""

    def __init__(self, drop, norm=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.enter = nn.Linear(5, WIDTH)
        self.enter.bias.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def samples(seed, count, dtype="float64"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(getattr(torch, dtype)), x[:, :CLASSES].argmax(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def recipe(optimizer="sgd", dtype="float64", pause_s=0.0, drop=0.1, tells="", norm=False):
    def loss(outputs, targets):
        time.sleep(pause_s)
        if tells:  # which process it is that runs a pass
            with Path(tells).open("a") as file:
                file.write(f"{os.getpid()}\n")
        return functional.cross_entropy(outputs, targets)

    return instep.Recipe(
        model=Net(drop, norm).to(getattr(torch, dtype)),
        loss=loss,
        weight=lambda batch: len(batch[0]),
        optimizer=sgd if optimizer == "sgd" else lambda p: torch.optim.AdamW(p, lr=0.01),
        train=samples(1, SAMPLES, dtype),
        validate=samples(2, 21, dtype),
    )


def sabotaged():
    """Gradients of the replica's first rank alone, instead of their sum."""
    from instep.parallel import lockstep, whole_sums

    def first_rank_s(parts, out=None):
        return parts[0].clone() if out is None else out.copy_(parts[0])

    lockstep.in_rank_order = whole_sums.in_rank_order = first_rank_s
    return recipe()


class Uneven(Net):
    """Leaves out a block on one process of a replica."""

    def forward(self, x):
        x = self.enter(x)
        second = distributed.is_initialized() and distributed.get_rank() == 1
        for block in self.blocks[1:] if second else self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def uneven():
    made = recipe()
    return replace(made, model=Uneven(0.1).double())


def inputs():
    return samples(1, SAMPLES)
