"""A table of which a batch gives a sparse gradient: in a layer, or by a function."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import instep


class Layer(nn.Module):
    """As it is usual."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 3, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        """Classes of texts."""
        return self.words(words).mean(1)


class Function(nn.Module):
    """Shows no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 3))

    def forward(self, words: Tensor) -> Tensor:
        """As `Layer`."""
        return functional.embedding(words, self.table, sparse=True).mean(1)


def recipe(by: str) -> instep.Recipe:
    """By a layer or a function."""
    words = torch.arange(64 * 4).reshape(64, 4) % 20
    return instep.Recipe(
        model={"layer": Layer, "function": Function}[by],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(words, words.sum(1) % 3),
    )
