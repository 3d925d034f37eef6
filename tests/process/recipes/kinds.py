"""One recipe for each kind of model and optimizer whose bits must not depend on the machines."""

import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import instep

SAMPLES = 101  # so that the last batch of an epoch is smaller, and cut otherwise


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def classes(count: int) -> torch.Tensor:
    return torch.randint(0, count, (SAMPLES,), generator=torch.Generator().manual_seed(2))


def words(length: int, count: int) -> torch.Tensor:
    return torch.randint(0, count, (SAMPLES, length), generator=torch.Generator().manual_seed(3))


def mlp() -> instep.Recipe:
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5)),
        loss=functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        train=TensorDataset(numbers(12), classes(5)),
        validate=TensorDataset(numbers(12, seed=9), classes(5)),
    )


def convolution() -> instep.Recipe:
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 4),
    )  # fmt: skip
    return instep.Recipe(
        model=model,
        loss=functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        train=TensorDataset(numbers(2, 10, 10), classes(4)),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.places = nn.Parameter(torch.zeros(9, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.layers(self.words(text) + self.places[: text.shape[1]], mask))


def text_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    (text,) = batch
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def transformer() -> instep.Recipe:
    return instep.Recipe(
        model=Transformer(),
        compute_loss=text_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        train=TensorDataset(words(10, 30)),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        states, _ = self.layers(self.words(text))
        return self.head(states[:, -1])


def recurrent() -> instep.Recipe:
    return instep.Recipe(
        model=Recurrent(),
        loss=functional.cross_entropy,
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.05),
        train=TensorDataset(words(7, 20), classes(3)),
    )


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(500, 6, sparse=True)
        self.dense = nn.EmbeddingBag(50, 6, mode="mean")
        self.head = nn.Linear(12, 1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.sparse(text).mean(1), self.dense(text % 50)], 1))


def embeddings() -> instep.Recipe:
    return instep.Recipe(
        model=Embedded(),
        loss=functional.mse_loss,
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1),
        train=TensorDataset(words(5, 500), numbers(1)),
    )


class Noisy(Dataset):
    """Samples that draw from all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = random.random() + np.random.rand()
        return torch.full((6,), index / SAMPLES) + torch.rand(6) + shift, torch.tensor([shift])


def shaken(sample: tuple, generator: torch.Generator) -> tuple:
    inputs, target = sample
    return inputs + 0.1 * torch.randn(6, generator=generator), target


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs)) * self.frozen


def groups() -> instep.Recipe:
    """Several groups, a scheduler that knows the length, noise in the data; clipped by the job."""
    return instep.Recipe(
        model=Groups(),
        loss=functional.mse_loss,
        parameters=lambda model: [
            {"params": model.body.parameters(), "weight_decay": 0.1},
            {"params": model.head.parameters(), "lr": 0.02},
        ],
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.005, amsgrad=True),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.01, 0.03], total_steps=steps + 1
        ),
        train=Noisy(),
        augment=shaken,
    )


class Layerwise(torch.optim.Optimizer):
    """Adam's direction, as long as the tensor it moves (You et al. 2020, arXiv:1904.00962)."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                scale = math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
                way = scale * state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
                p.add_(way, alpha=-group["lr"] * float(p.norm() / way.norm().clamp(min=1e-6)))


def layerwise() -> instep.Recipe:
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.SiLU(), nn.Linear(40, 5)),
        loss=functional.cross_entropy,
        optimizer=lambda p: Layerwise(p, lr=0.02),
        train=TensorDataset(numbers(12), classes(5)),
    )


class Langevin(torch.optim.SGD):
    """Adds noise to every step (Welling and Teh 2011)."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


def outliers() -> instep.Recipe:
    """Now and then a gradient a million times as large as usual: the lattice must give way."""
    targets = numbers(1)
    targets[17] = 1e6
    return instep.Recipe(
        model=nn.Linear(12, 1),
        loss=functional.mse_loss,
        optimizer=lambda p: Langevin(p, lr=1e-4),
        train=TensorDataset(numbers(12), targets),
    )


KINDS = {
    f.__name__: f
    for f in (
        mlp,
        convolution,
        transformer,
        recurrent,
        embeddings,
        groups,
        layerwise,
        outliers,
    )
}
TRAIN: dict[str, dict[str, object]] = {
    "groups": {"max_grad_norm": 0.5},
    "mixed": {"precision": "bfloat16"},
}
"""What a kind wants in its job beside the usual."""
KINDS["mixed"] = convolution
