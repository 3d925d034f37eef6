"""Sequences of different length, padded by collate; each token has a loss, and the mean is over
tokens."""

from pathlib import Path

import numpy as np
import torch
from slow_tiny import Slow
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler

import instep

SAMPLES, WIDTH = 83, 3


def lengths():
    drawn = np.random.default_rng(4).lognormal(1.5, 0.8, SAMPLES)
    return np.clip(drawn, 1, 40).astype(np.int64).tolist()


class Sequences(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.rows = [
            torch.randn(length, WIDTH, generator=g, dtype=torch.float64) for length in lengths()
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, rows):
        return self.layers(rows)[..., 0]


def compute_loss(net, batch):
    rows, sizes = batch
    mask = torch.arange(rows.shape[1]) < sizes[:, None]
    errors = (net(rows) - rows.sum(-1).sin()) ** 2
    return instep.WeightedLoss((errors * mask).sum(), mask.sum())


class Buckets(Sampler):
    """A batch sampler as people write them: batches of samples of about one length."""

    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size = lengths, batch_size

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self):
        ranked = np.argsort(self.lengths).tolist()
        for first in range(0, len(ranked), self.batch_size):
            yield ranked[first : first + self.batch_size]


def model():
    torch.manual_seed(3)
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def recipe(sampler: str = "", longer: str = "", pause_s: float = 0.0) -> instep.Recipe:
    """The recipe; `longer` is a file that makes all lengths greater by one, once it is there."""
    train = Slow(Sequences(), pause_s) if pause_s else Sequences()
    given = [each + Path(longer).is_file() for each in lengths()]
    if sampler == "buckets":
        batches = Buckets(given, 9)
        train = DataLoader(train, batch_sampler=batches, collate_fn=collate)
    if sampler == "subset":
        some = SubsetRandomSampler(range(0, SAMPLES, 2))
        train = DataLoader(train, sampler=some, batch_size=9, drop_last=True)
    return instep.Recipe(
        model=model(),
        optimizer=optimizer,
        train=train,
        length=given if sampler in ("", "subset") else None,
        compute_loss=compute_loss,
        collate=collate,
    )
