"""A model that is built in parts: tied weights, a table, drawn numbers, what a file has and not."""

import dataclasses

import splits
import torch
from splits import CLASSES, WIDTH, Block, samples, sgd
from torch import nn

import instep

SAMPLES = 90


class Tied(nn.Module):
    """Its first and last layer have one weight; `angles` is in no file, `counted` is."""

    def __init__(self, drawn=False, copied=False, classes=CLASSES):
        super().__init__()
        self.enter = nn.Linear(5, WIDTH, bias=False)
        blocks = [Block(0.1) for _ in range(4)]
        if copied:
            encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)
            self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, classes)
        self.back = nn.Linear(WIDTH, 5, bias=False)
        self.back.weight = nn.Parameter(self.enter.weight.detach().T.contiguous())
        self.again = nn.Linear(5, WIDTH, bias=False)
        self.again.weight = self.enter.weight
        angles = torch.randn(WIDTH) if drawn else torch.arange(WIDTH) / WIDTH
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("counted", torch.zeros(()))
        self.copied = copied

    def forward(self, x):
        x = self.enter(x) + self.angles
        for block in self.blocks:
            x = block(x)
        if self.copied:
            x = self.encoder(x[:, None])[:, 0]
        return self.head(x + self.again(self.back(x)))


def recipe(drawn=False, copied=False, classes=CLASSES):
    return instep.Recipe(
        model=lambda: Tied(drawn, copied, classes).double(),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train=samples(1, SAMPLES),
        validate=samples(2, 21),
    )


def sabotaged():
    """Gradients of the replica's first rank alone, instead of their sum."""
    splits.sabotaged()
    return recipe()


def built():
    return dataclasses.replace(recipe(), model=Tied().double())
