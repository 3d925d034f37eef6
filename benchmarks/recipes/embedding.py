"""Classifying made-up texts by the mean of their words: nearly all of it is one embedding."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


class Texts(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width)
        self.top = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, texts: Tensor) -> Tensor:
        result: Tensor = self.top(self.word(texts).mean(1))
        return result


def recipe(
    samples: int = 20_000, words: int = 50_000, width: int = 64, length: int = 64
) -> instep.Recipe:
    texts = torch.randint(words, (samples, length))
    labels = torch.randint(10, (samples,))
    return instep.Recipe(
        model=Texts(words, width),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        train=TensorDataset(texts, labels),
    )
