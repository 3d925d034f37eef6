"""A float64 model with running statistics, for runs that are held against each other."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import instep

GPU = "cuda" if torch.cuda.is_available() else "cpu"
"""Asked when the file is imported, as many do, and before workers are forked."""

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    # eps far above rounding: else a gradient of nearly zero takes a full step in either direction
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, eps=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def table(kind: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(133, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs.to(kind), torch.sin(inputs @ weight).to(kind))


def held_out() -> Subset[tuple[Tensor, ...]]:
    return Subset(table(torch.float64), range(96, 133))


def recipe(optimizer: str = "adamw", norm: bool = True, dtype: str = "float64") -> instep.Recipe:
    kind = getattr(torch, dtype)
    middle = nn.BatchNorm1d(64) if norm else nn.LayerNorm(64)
    model = nn.Sequential(nn.Linear(12, 64), middle, nn.Tanh(), nn.Linear(64, 3))
    return instep.Recipe(
        model=model.to(kind),
        loss=nn.MSELoss(),
        optimizer=OPTIMIZERS[optimizer],
        train=Subset(table(kind), range(96)),
        validate=Subset(table(kind), range(96, 133)),
        predict=lambda model, batch: model(batch[0]),
    )
