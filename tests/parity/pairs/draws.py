"""Models whose forward pass draws random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch
from pair import Parts, pair, samples_of
from torch import nn
from torch.nn import functional as F

from pairs.common import classes, gentle_adamw, images, mlp
from pairs.tokens import Reader, count, mean_over_tokens, padded, sentences


class Dropping(nn.Module):
    """A transformer with dropout everywhere."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(self.embed(x.flatten(2).transpose(1, 2)))[:, 0])


@pair("transformer with dropout", draws=True)
def dropout():
    return Parts(
        model=Dropping(),
        train=images(4),
        loss=nn.CrossEntropyLoss(),
        optimizer=gentle_adamw,
    )


class WithDropout(Reader):
    def __init__(self):
        super().__init__()
        self.out = nn.Sequential(nn.Dropout(0.3), self.out)


@pair("dropout and padded tokens", draws=True)
def dropout_tokens():
    return Parts(
        model=WithDropout(),
        train=sentences(),
        collate=padded,
        compute_loss=mean_over_tokens,
        of=count,
        given={"weight": count},
    )


class VAE(nn.Module):
    """Draws the code from where the encoder says."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(outputs=6), nn.Linear(3, 6)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.decoder(code), mean, spread


@pair("VAE", draws=True)
def vae():
    def loss(model, batch):
        outputs, mean, spread = model(batch[0])
        divergence = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1)
        return (outputs - batch[0]).square().sum(1).mean() + divergence.mean()

    return Parts(
        model=VAE(),
        train=classes(),
        compute_loss=loss,
        given={"weight": samples_of},
        optimizer=gentle_adamw,
    )


class Depth(nn.Module):
    """Leaves layers out by chance, with Python's and numpy's generators."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            drawn = random.random() if number % 2 else np.random.rand()
            if drawn > 0.3:
                x = x + torch.tanh(layer(x))
        return self.head(x)


@pair("stochastic depth by Python's generators", draws=True)
def depth():
    return Parts(model=Depth(), train=classes(), loss=nn.CrossEntropyLoss())


@pair("dropout before a head of zeros", draws=True)
def dropout_before_zeros():
    """At the start no loss shows what was drawn."""
    head = nn.Linear(16, 4)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), head)
    return Parts(model=model, train=classes(), loss=nn.CrossEntropyLoss())


@pair("noise on the targets, in the loss", draws=True)
def noisy_targets():
    def loss(outputs, target):
        flipped = torch.where(torch.rand_like(target, dtype=torch.float32) < 0.2, 0, target)
        return F.cross_entropy(outputs, flipped)

    return Parts(model=mlp(), train=classes(), loss=loss, given={"weight": samples_of})


@pair("dropout and ignore_index", draws=True)
def dropout_ignored():
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 4))
    return Parts(
        model=model,
        train=classes(),
        loss=nn.CrossEntropyLoss(ignore_index=0),
        of=lambda batch: float((batch[1] != 0).sum()),
    )
