"""Sparse embeddings, of words that are often the same; a sample may take a while."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import instep

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
    "rowwise": lambda model: instep.RowwiseAdagrad(model.parameters(), lr=0.1),
    "sparse_adam": lambda model: [
        torch.optim.SparseAdam([*model.words.parameters(), *model.bag.parameters()], lr=0.05),
        torch.optim.Adam(model.out.parameters(), lr=0.01),
    ],
}


class Net(nn.Module):
    def __init__(self, rows: int, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, dim, sparse=sparse)
        self.bag = nn.EmbeddingBag(rows, dim, sparse=sparse, padding_idx=0)
        self.out = nn.Linear(dim, 1)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(words[:, 0]) * self.bag(words[:, 1:]))[:, 0]
        return found


class Words(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, rows: int, first: int, stop: int, pause_s: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = (torch.rand(stop, 5, generator=generator) ** 3 * rows).long()[first:]
        self.targets = torch.randn(stop, generator=generator)[first:]
        self.pause_s = pause_s

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        return self.words[index], self.targets[index]


def recipe(
    rows: int = 60,
    dim: int = 4,
    optimizer: str = "rowwise",
    sparse: bool = True,
    samples: int = 101,
    pause_s: float = 0.0,
) -> instep.Recipe:
    return instep.Recipe(
        model=lambda: Net(rows, dim, sparse=sparse),
        loss=nn.MSELoss(),
        parameters=lambda model: model,
        optimizer=OPTIMIZERS[optimizer],
        train=Words(rows, 0, samples, pause_s),
        validate=Words(rows, samples, samples + 37, 0.0),
        metrics={"error": lambda outputs, target: (outputs - target).abs().mean()},
    )


def words() -> Words:
    return Words(60, 0, 101, 0.0)
