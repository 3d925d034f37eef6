"""Models that a mesh splits: repeated blocks, dropout, what does not divide, what is frozen."""

import os
import resource
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from first_come import first
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

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
    """Its head has fewer rows than four ranks, one parameter has no dimension, one is frozen; the
    first and the last block may be tied."""

    def __init__(self, drop, norm=False, blocks=3, tied=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.enter = nn.Linear(5, WIDTH)
        self.enter.bias.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(blocks))
        if tied:
            self.blocks[-1].inner.weight = self.blocks[0].inner.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.pause_s = 0.0

    def forward(self, x):
        if self.pause_s and self.training:
            time.sleep(self.pause_s)
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def samples(seed, count, dtype="float64"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(getattr(torch, dtype)), x[:, :CLASSES].argmax(1))


class Frail(Dataset):
    """Of the processes that read it, one cannot read some samples, and the others cannot read
    others; or each draws its own."""

    def __init__(self, given, file, lost, others, draws):
        self._given, self._file, self._draws = given, file, draws
        self._lost, self._others = set(lost), set(others)

    def __len__(self):
        return len(self._given)

    def __getitem__(self, index):
        x, y = self._given[index]
        if index in self._lost | self._others and (index in self._lost) == self._is_mine():
            raise OSError(f"sector {index} is gone")
        return x + int.from_bytes(os.urandom(4)) * self._draws, y

    def _is_mine(self):
        with suppress(FileExistsError), open(self._file, "x") as file:  # the first that comes here
            file.write(str(os.getpid()))
        return Path(self._file).read_text() == str(os.getpid())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def recipe(optimizer="sgd", dtype="float64", pause_s=0.0, drop=0.1, tells="", **kind):
    def loss(outputs, targets):
        time.sleep(pause_s)
        if tells:  # which process it is that runs a pass
            with Path(tells).open("a") as file:
                file.write(f"{os.getpid()}\n")
        return functional.cross_entropy(outputs, targets)

    return instep.Recipe(
        model=Net(drop, **kind).to(getattr(torch, dtype)),
        loss=loss,
        weight=lambda batch: 2.5 * len(batch[0]),  # a unit of its own
        optimizer=sgd if optimizer == "sgd" else lambda p: torch.optim.AdamW(p, lr=0.01),
        train=samples(1, SAMPLES, dtype),
        validate=samples(2, 21, dtype),
    )


def frail(file="", lost=(), others=(), draws=0.0):
    return replace(recipe(), train=Frail(samples(1, SAMPLES), file, lost, others, draws))


def without_host_memory(**options):
    """No file of it can be so long; those in a folder can."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 33, most))
    return recipe(**options)


def sequences(pause_s=0.0, length=6):
    """Each position of a sequence has a class."""
    made = Net(drop=0.1).double()
    x = torch.randn(SAMPLES, length, 5, generator=torch.Generator().manual_seed(1)).double()

    def loss(outputs, targets):
        time.sleep(pause_s)
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return instep.Recipe(
        model=made,
        loss=loss,
        weight=lambda batch: len(batch[0]),
        optimizer=sgd,
        train=TensorDataset(x, x[..., :CLASSES].argmax(-1)),
    )


def one_is_slow(mark, pause_s=0.15, drop=0.1, norm=False):
    """`mark` is a file: who makes it is the slow one."""
    made = recipe(drop=drop, norm=norm)
    made.model.pause_s = pause_s if first(Path(mark)) else 0.0
    return made


def late_again(mark, seconds=4.0, **options):
    """`mark` is a file: who comes when it is there takes so long."""
    time.sleep(seconds if Path(mark).exists() else 0.0)
    return recipe(**options)


def sabotaged():
    """Gradients of the replica's first rank alone, instead of their sum."""
    from instep.comm import direct
    from instep.parallel.shard import whole_sums

    def first_rank_s(parts, out=None):
        return parts[0].clone() if out is None else out.copy_(parts[0])

    direct.in_rank_order = whole_sums.in_rank_order = first_rank_s
    return recipe()


class Uneven(Net):
    """Leaves out a block on one process of a replica."""

    def forward(self, x):
        x = self.enter(x)
        second = distributed.is_initialized() and distributed.get_rank() == 1
        for block in self.blocks[1:] if second else self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def filters():
    """No layer is a matrix product."""
    net = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, CLASSES, 5), nn.Flatten())
    return replace(recipe(), model=net.double())


def uneven():
    made = recipe()
    return replace(made, model=Uneven(0.1).double())


def inputs():
    return samples(1, SAMPLES)
