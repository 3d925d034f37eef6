"""Three classes of 40, 9 and 3 samples."""

import torch
from slow_tiny import Slow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import instep

COUNTS = (40, 9, 3)


def dataset():
    g = torch.Generator().manual_seed(1)
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    labels = labels[torch.randperm(len(labels), generator=g)]
    inputs = torch.randn(len(labels), 4, generator=g, dtype=torch.float64) + labels[:, None]
    return TensorDataset(inputs, labels)


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def each_loss(net, batch):
    losses = nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")
    return instep.WeightedLoss(losses, 1.0)


def noisy(sample, generator):
    return sample[0] + torch.rand((), generator=generator), sample[1]


def recipe(
    sampled: bool = False, own: bool = False, noise: bool = False, pause_s: float = 0.0
) -> instep.Recipe:
    data = dataset()
    labels = data.tensors[1]
    train = data = Slow(data, pause_s) if pause_s else data
    if sampled:
        weights = 1.0 / torch.bincount(labels)[labels]
        train = DataLoader(data, sampler=WeightedRandomSampler(weights, len(data)))
    return instep.Recipe(
        model=model(),
        optimizer=optimizer,
        train=train,
        labels=labels,
        augment=noisy if noise else None,
        **({"compute_loss": each_loss} if own else {"loss": nn.CrossEntropyLoss()}),
    )
