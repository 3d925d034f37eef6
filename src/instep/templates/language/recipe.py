"""A small GPT that learns to write from the documentation that comes with your own Python.

    instep run job.toml

A token is a character. For your own text, read your file in `pages`. `write.py` writes with
the trained model.
"""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

LENGTH = 64


def recipe(lr: float = 3e-3) -> instep.Recipe:
    text = pages()
    held_out = len(text) // 20
    return instep.Recipe(
        model=GPT(layers=2, width=64),
        loss=cross_entropy,
        weight=lambda batch: batch[1].numel(),  # the loss is a mean over characters
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=windows(text[held_out:]),
        validate=windows(text[:held_out]),
    )


def pages() -> str:
    """Everything that `help()` knows of the language itself."""
    return "\n".join(topics.values())


def windows(text: str) -> TensorDataset:
    """Characters [windows, length], and the next one of each."""
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    whole = codes[: (len(codes) - 1) // LENGTH * LENGTH + 1]
    return TensorDataset(whole[:-1].view(-1, LENGTH), whole[1:].view(-1, LENGTH))


def cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        heads = self.queries_keys_values(self.norm_1(x)).unflatten(2, (3, 4, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.think(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, text: Tensor) -> Tensor:  # [batch, length] -> [batch, length, 128]
        x = self.character(text) + self.place.weight[: text.shape[1]]
        return self.last(self.blocks(x))
