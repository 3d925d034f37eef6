"""Streams: with and without a state, divided by `get_worker_info`, ending and endless."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

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


class Asked(IterableDataset):
    """Asks a server at a Unix socket for each number, which it gives once."""

    def __init__(self, address):
        self.address = address

    def __iter__(self):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            while True:
                connection.sendall(b"?")
                yield sample(int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little"))


class CountedSteps(torch.optim.SGD):
    done = 0

    def step(self, closure=None):
        CountedSteps.done += 1
        return super().step(closure)


class DiesTwice(nn.MSELoss):
    """A process dies after 15 steps of its own, and another one after 30."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def forward(self, outputs, targets):
        if (name := {15: "first", 30: "second"}.get(CountedSteps.done)) is not None:
            with suppress(FileExistsError):
                os.close(os.open(f"{self.folder}/{name}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(outputs, targets)


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


def asked(address: str) -> instep.Recipe:
    return instep.Recipe(
        model=model(),
        optimizer=lambda parameters: CountedSteps(parameters, lr=0.1),
        train=Asked(address),
        loss=DiesTwice(str(Path(address).parent)),
    )


def mixed(kind: str = "told", count: int = 600) -> instep.Recipe:
    kinds = KINDS[kind]
    return instep.Recipe(
        model=model(),
        optimizer=optimizer,
        train={"large": kinds(count), "small": Numbers(count + 50, first=count)},
        loss=nn.MSELoss(),
    )
