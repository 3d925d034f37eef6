"""A large MLP on labels that a small one gave: much to send, little to compute, and it can learn.

4.2 million parameters. Inputs lie near a plane of 16 dimensions in 784.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def recipe(
    widths: tuple[int, int] = (1792, 1536), lr: float = 1e-3, samples: int = 20_000
) -> instep.Recipe:
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    place = drawn(samples + 500, 16)
    images = place @ drawn(16, 784) / 4 + 0.1 * drawn(samples + 500, 784)
    labels = (torch.tanh(place @ drawn(16, 32)) @ drawn(32, 10)).argmax(1)
    first, second = widths
    return instep.Recipe(
        model=nn.Sequential(
            nn.Linear(784, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(),
            nn.Linear(second, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=TensorDataset(images[:samples], labels[:samples]),
        validate=TensorDataset(images[samples:], labels[samples:]),
    )  # fmt: skip
