"""A small GPT on words of a chain in which each word is likely after two others: it can learn.

0.8 million parameters; about as long to compute as to send at 100 Mbit/s.
"""

import torch
from gpt import GPT
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import instep

WORDS, LENGTH = 256, 64


def chain(sequences: int) -> torch.Tensor:
    """[sequences, LENGTH + 1] words; each is one of four that follow from the two before it."""
    generator = torch.Generator().manual_seed(13)
    first, second = (torch.randint(WORDS, (WORDS, 4), generator=generator) for _ in range(2))
    words = torch.randint(WORDS, (sequences, LENGTH + 1), generator=generator)
    pick = torch.randint(4, (LENGTH + 1, sequences), generator=generator)
    for at in range(2, LENGTH + 1):
        now = torch.arange(sequences), pick[at]
        words[:, at] = (first[words[:, at - 1], now[1]] + second[words[:, at - 2] % 2, 0]) % WORDS
    return words


def recipe(
    layers: int = 4, width: int = 128, lr: float = 1e-3, samples: int = 8000
) -> instep.Recipe:
    tokens = chain(samples + 200)
    inputs, target = tokens[:, :-1], tokens[:, 1:]
    return instep.Recipe(
        model=GPT(layers, width, 4, LENGTH),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        weight=lambda batch: batch[1].numel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=TensorDataset(inputs[:samples], target[:samples]),
        validate=TensorDataset(inputs[samples:], target[samples:]),
    )
