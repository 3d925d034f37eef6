"""Streams: with and without a state, divided by `get_worker_info`, ending and endless."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import instep


def sample(number):
    draw = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, generator=draw, dtype=torch.float64)
    return inputs, inputs.sum().sin() + number % 7 / 7


class Numbers(IterableDataset):
    """Samples of the numbers below `count`, each `num_workers`-th for a loader."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __iter__(self):
        info = get_worker_info()
        for number in range(self.first + info.id, self.count, info.num_workers):
            yield sample(number)


class Told(IterableDataset):
    """The same, and says where it is."""

    def __init__(self, count):
        self.count, self.at = count, None

    def __iter__(self):
        info = get_worker_info()
        if self.at is None or self.at >= self.count:
            self.at = info.id
        while self.at < self.count:
            self.at += info.num_workers
            yield sample(self.at - info.num_workers)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Undivided(IterableDataset):
    """Gives each loader all."""

    def __iter__(self):
        yield from map(sample, range(100))


class Live(IterableDataset):
    """Gives what no process can read again."""

    def __iter__(self):
        while True:
            yield torch.tensor(list(os.urandom(8))), torch.tensor(0.0)


KINDS = {"numbers": Numbers, "told": Told, "undivided": lambda count: Undivided()}


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def recipe(kind: str = "numbers", count: int = 600, loaders: int = 0) -> instep.Recipe:
    data = Live() if kind == "live" else KINDS[kind](count)
    return instep.Recipe(
        model=model(),
        optimizer=optimizer,
        train=DataLoader(data, num_workers=loaders) if loaders else data,
        loss=nn.MSELoss(),
    )
