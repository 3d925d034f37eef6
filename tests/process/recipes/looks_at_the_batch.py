"""A model whose layers look at the batch and draw, with a loss per sample and one of the batch."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import instep


class Towers(nn.Module):
    def __init__(self, sees_batch):
        super().__init__()
        middle = nn.SyncBatchNorm(8) if sees_batch else nn.Tanh()
        self.image = nn.Sequential(nn.Linear(6, 8), middle, nn.Dropout(0.3), nn.Linear(8, 5))
        self.text = nn.Linear(4, 5)
        self.temperature = nn.Parameter(torch.tensor(0.5))


def pairs(samples=100):
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :4].sin())


def embed(model, batch):
    image, text = batch
    views = model.image(image), model.text(text)
    return tuple(functional.normalize(view, dim=1) for view in views), None


def batch_loss(model, embeddings, targets):
    image, text = embeddings
    right = torch.arange(len(image))
    return functional.cross_entropy(image @ text.T * model.temperature.exp(), right)


def each(model, batch):
    return (model.image(batch[0])[:, :4] - batch[1]).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def contrast(sees_batch: bool = True) -> instep.Recipe:
    return instep.Recipe(
        model=Towers(sees_batch).double(),
        train=pairs(),
        validate=pairs(20),
        embed=embed,
        batch_loss=batch_loss,
        optimizer=sgd,
    )


def per_sample() -> instep.Recipe:
    return instep.Recipe(
        model=Towers(True).double(),
        train=pairs(),
        compute_loss=each,
        weight=lambda batch: len(batch[0]),
        optimizer=sgd,
    )
