"""Recommenders: embeddings of users and things, dense and sparse."""

from __future__ import annotations

import torch
from pair import SAMPLES, Parts, pair
from torch import nn

from pairs.common import gentle_adamw


class Recommender(nn.Module):
    """A rating from two embeddings."""

    def __init__(self, sparse):
        super().__init__()
        self.users = nn.Embedding(30, 8, sparse=sparse)
        self.things = nn.Embedding(50, 8, sparse=sparse)

    def forward(self, ids):
        return (self.users(ids[:, 0]) * self.things(ids[:, 1])).sum(1)


class Tower(Recommender):
    """With a small network behind the embeddings."""

    def __init__(self, sparse):
        super().__init__(sparse)
        self.body = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids):
        both = torch.cat([self.users(ids[:, 0]), self.things(ids[:, 1])], 1)
        return self.body(both).squeeze(1)


def ratings():
    ids = torch.stack([torch.randint(0, 30, (SAMPLES,)), torch.randint(0, 50, (SAMPLES,))], 1)
    return [(pair, (pair.sum() % 5).to(torch.get_default_dtype())) for pair in ids]


def recommender(model, optimizer):
    return Parts(model=model, train=ratings(), loss=nn.MSELoss(), optimizer=optimizer)


@pair("recommender, dense")
def dense():
    return recommender(Tower(False), gentle_adamw)


@pair("recommender, sparse, SGD")
def sparse_sgd():
    return recommender(Tower(True), lambda p: torch.optim.SGD(p, lr=0.05))


@pair("recommender, sparse, SparseAdam")
def sparse_adam():
    """Only rows that the batch holds are moved, also where their gradient's mean is old."""
    return recommender(
        Recommender(True), lambda p: torch.optim.SparseAdam(list(p), lr=1e-2, eps=1e-3)
    )


@pair("recommender, sparse, Adagrad")
def sparse_adagrad():
    return recommender(Recommender(True), lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3))


class Bags(nn.Module):
    """Sums of the embeddings of several words, told by where each bag begins."""

    def __init__(self):
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(40, 8, mode="sum"), nn.Linear(8, 3)

    def forward(self, given):
        return self.out(self.bags(*given))


@pair("bags of embeddings")
def bags():
    def collate(samples):
        words = torch.cat([x for x, _ in samples])
        begins = torch.tensor([0, *(len(x) for x, _ in samples[:-1])]).cumsum(0)
        return (words, begins), torch.tensor([y for _, y in samples])

    train = [
        (torch.randint(0, 40, (1 + int(torch.randint(0, 6, ())),)), number % 3)
        for number in range(SAMPLES)
    ]
    return Parts(model=Bags(), train=train, collate=collate, loss=nn.CrossEntropyLoss())
