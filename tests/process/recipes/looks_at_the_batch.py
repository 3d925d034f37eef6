"""A model whose layers look at the batch and draw, with a loss per sample and one of the batch.

Where `mark` names a file, one worker is killed, once, between the reads of its layers.
"""

import os
import signal
from pathlib import Path

import torch
from first_come import first
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import instep

KILLED_AT = 3
"""The pass in which it is."""


class Mortal(nn.Dropout):
    """Draws after a layer has asked the other workers, and before it asks them again."""

    def __init__(self, mark):
        super().__init__(0.3)
        self.mark, self.passes, self.trained = mark, 0, id(self)

    def forward(self, x):
        trains = self.training and id(self) == self.trained  # and is no copy, to try something
        self.passes += trains and torch.is_grad_enabled()
        if self.mark and self.passes >= KILLED_AT and first(Path(self.mark)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Towers(nn.Module):
    def __init__(self, sees_batch, mark=""):
        super().__init__()
        self.among = nn.BatchNorm1d(5, affine=False)
        middle = nn.SyncBatchNorm(8) if sees_batch else nn.Tanh()
        self.image = nn.Sequential(nn.Linear(6, 8), middle, Mortal(mark), nn.Linear(8, 5))
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


def cross_correlation(model, embeddings, targets):
    """That of Barlow Twins: batch normalisation in the loss, of both views."""
    image, text = (model.among(view) for view in embeddings)
    found = image.T @ text / len(image)
    return (found - torch.eye(5, dtype=found.dtype)).square().mean()


def each(model, batch):
    return (model.image(batch[0])[:, :4] - batch[1]).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def contrast(sees_batch: bool = True, mark: str = "", loss=batch_loss) -> instep.Recipe:
    return instep.Recipe(
        model=Towers(sees_batch, mark).double(),
        train=pairs(),
        validate=pairs(20),
        embed=embed,
        batch_loss=loss,
        optimizer=sgd,
    )


def twins(mark: str = "") -> instep.Recipe:
    return contrast(mark=mark, loss=cross_correlation)


def per_sample(mark: str = "") -> instep.Recipe:
    return instep.Recipe(
        model=Towers(True, mark).double(),
        train=pairs(),
        compute_loss=each,
        weight=lambda batch: len(batch[0]),
        optimizer=sgd,
    )
