"""A byte-level GPT that learns to write Python from the standard library of your own Python.

    instep run examples/02_gpt/job.toml
    instep run examples/02_gpt/job.toml --set arguments.layers=2 --set arguments.width=128
    python examples/02_gpt/sample.py runs/gpt

Shows parameter groups, a learning-rate schedule, clipping and a text data source.
The default size is 10.8 million parameters.
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

import instep
from instep.data.sources import text


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = max(1, width // 64), dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        x = x + self.attend(self.norm_1(x))
        return x + self.think(self.norm_2(x))

    def attend(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(x).unflatten(2, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # [batch, length] bytes -> [batch, length, 256]
        x = self.byte(text) + self.place.weight[: text.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.byte.weight)  # embedding and head are one


def recipe(
    layers: int = 6,
    width: int = 384,
    length: int = 256,
    dropout: float = 0.0,
    lr: float = 1e-3,
    steps: int = 100,
) -> instep.Recipe:
    files = library()
    held_out = text(files[::20], length)
    return instep.Recipe(
        model=GPT(layers, width, length, dropout),
        loss=lambda outputs, target: F.cross_entropy(outputs.flatten(0, 1), target.flatten()),
        weight=lambda batch: batch[1].numel(),  # a mean over characters
        parameters=groups,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95)),
        scheduler=lambda optimizer: warm_up_and_cosine(optimizer, steps),
        train=text([file for n, file in enumerate(files) if n % 20], length),
        validate=Subset(held_out, range(0, len(held_out), max(1, len(held_out) // 64))),
        metrics={"bits_per_byte": bits_per_byte},
    )


def library() -> list[Path]:
    """The standard library's files, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    return sorted(file for file in root.rglob("*.py") if not others & set(file.parts))


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices, none for biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


def warm_up_and_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise to the full rate in the first tenth of the steps, then fall to a tenth of it."""
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, steps - warm))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def bits_per_byte(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten()) / math.log(2)
