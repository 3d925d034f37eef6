"""Data and small modules that several pairs share."""

from __future__ import annotations

import torch
from pair import GLOBAL_BATCH, SAMPLES, SEED, STEPS
from torch import Tensor, nn

from instep.data.order import Order, position


def classes(width: int = 6, kinds: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Samples of `kinds` classes, unevenly frequent."""
    inputs = torch.randn(SAMPLES, width)
    target = (inputs.cumsum(1).sin().sum(1).abs() * 2).long().clamp(max=kinds - 1)
    return list(zip(inputs, target, strict=True))


def regression(width: int = 6, outputs: int = 3) -> list[tuple[Tensor, Tensor]]:
    """A smooth function of `width` numbers."""
    inputs = torch.randn(SAMPLES, width)
    target = inputs.sin().cumsum(1)[:, :outputs] + 0.3
    return list(zip(inputs, target, strict=True))


def images(size: int = 8, kinds: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Small pictures in three colours, of `kinds` classes."""
    pictures = torch.randn(SAMPLES, 3, size, size)
    target = (pictures.mean((1, 2, 3)) * 40).long().abs().clamp(max=kinds - 1)
    return list(zip(pictures, target, strict=True))


def mlp(width: int = 6, hidden: int = 16, outputs: int = 4) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def lengths(longest: int, shortest: int = 1) -> list[int]:
    """Of sequences, very uneven, so that micro-batches hold unequal numbers of tokens."""
    drawn = torch.rand(SAMPLES) ** 3 * (longest - shortest + 1)
    return [int(x) + shortest for x in drawn]


def first_of_each_step() -> set[int]:
    """A sample of every step: with a target of its own, no step is a mean of nothing."""
    order = Order(SAMPLES, SEED)
    steps = [position(step, SAMPLES, GLOBAL_BATCH) for step in range(1, STEPS + 1)]
    return {int(order.indices(at.epoch, at.first, at.first + 1)[0]) for at in steps}


def gentle_adamw(parameters):
    """AdamW with an eps above rounding.

    Else a gradient of nearly zero, which is nothing but rounding, takes a full step in either
    direction, in two plain loops as well.
    """
    return torch.optim.AdamW(parameters, lr=5e-3, eps=1e-3)
