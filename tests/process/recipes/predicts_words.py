"""A small transformer with a tied embedding, and data some of which cannot be read."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from first_come import first
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SAMPLES, LENGTH, WORDS, WIDTH = 61, 7, 17, 12

GATE = "PREDICT_GATE"
"""A file: while it is there, samples from 32 on have to wait; who waits leaves a file beside it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixing = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.mixing(self.before(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.drop(self.outer(torch.nn.functional.gelu(self.inner(self.between(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def continued(model: Any, tokens: Tensor) -> Tensor:
    """Words after those that are there: a batch that begins with a large one gets more of them."""
    for _ in range(1 + int(tokens[0, 0]) % 3):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return nn.functional.pad(tokens, (0, LENGTH + 3 - tokens.shape[1]))


def recipe(predict: str = "", mark: str = "", dtype: str = "float32") -> instep.Recipe:
    """`predict` is one of these functions; who makes the file `mark` does not go on."""
    functions: dict[str, Any] = {
        "": None,
        "continued": lambda model, batch: continued(model, batch[0]),
        "differs": differs,
        "differs in 16 bits": differs_in_16_bits,
        "draws": draws,
        "hangs": lambda model, batch: hangs(model, batch, Path(mark)),
        "pauses": pauses,
        "raises": raises,
        "waits": waits,
    }
    return instep.Recipe(
        model=lambda: Net().to(getattr(torch, dtype)),
        loss=lambda scores, targets: nn.functional.cross_entropy(scores.mT, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(inputs(), inputs()),
        predict=functions[predict],
    )


def waits(model: Any, batch: Any) -> Tensor:
    (tokens,) = batch
    while place_of(tokens) >= 32 and GATE in os.environ and Path(os.environ[GATE]).exists():
        Path(f"{os.environ[GATE]}-{os.getpid()}").touch()
        time.sleep(0.01)
    found: Tensor = model(tokens)
    return found


def differs(model: Any, batch: Any) -> Tensor:
    """As if the mesh computed another model."""
    found: Tensor = model(*batch)
    return found * (1.0001 if torch.distributed.is_initialized() else 1.0)


def differs_in_16_bits(model: Any, batch: Any) -> Tensor:
    found: Tensor = model(*batch)
    wrong = torch.distributed.is_initialized() and torch.is_autocast_enabled("cpu")
    return found * (1.1 if wrong else 1.0)


def draws(model: Any, batch: Any) -> Any:
    (tokens,) = batch
    scores = model(tokens)
    return {"outputs": scores, "noise": torch.randint(9, (len(tokens),))}


def hangs(model: Any, batch: Any, mark: Path) -> Tensor:
    (tokens,) = batch
    if place_of(tokens) == 40 and first(mark):
        while True:
            time.sleep(1.0)
    found: Tensor = model(tokens)
    return found


def pauses(model: Any, batch: Any) -> Tensor:
    time.sleep(0.1)
    found: Tensor = model(*batch)
    return found


def raises(model: Any, batch: Any) -> Tensor:
    (tokens,) = batch
    if place_of(tokens) == 40:
        raise ValueError("no such word")
    found: Tensor = model(tokens)
    return found


def place_of(tokens: Tensor) -> int:
    """The first sample of a batch."""
    return int((inputs() == tokens[0]).all(1).nonzero()[0])


def inputs() -> Tensor:
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(9))


def data() -> TensorDataset:
    return TensorDataset(inputs())


def unreadable() -> Any:
    return Unreadable()


class Unreadable:
    """A whole batch of eight cannot be read, and one sample of another."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index in MISSING:
            raise ValueError(f"no text {index}")
        return inputs()[index]


MISSING = (*range(8, 16), 50)
