"""Samples of the shapes of real ones, and of nothing else of them.

How gradients are computed changes their last bits, so no content may decide it. Ways in:
`stand_ins`, `on_last`, and `off_start` for parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from instep.parallel.nested import on_tensors

STAND_INS = 4
"""Samples on which ways to compute gradients are compared."""

_BY, _LEAST = 0.05, 1e-3
"""How far parameters are moved, relative to their root mean square; or to 1, if that is less."""


def stand_ins(one: Any, count: int) -> Any:
    """Samples with the shapes and types of one: floating-point numbers are drawn from a Gaussian,
    the same each time, and whole numbers are 0 and 1, which stand for a class and a word too.

    Args:
        one: a batch of one sample, nested tensors [1, ...].
        count: how many.
    """
    generator = torch.Generator().manual_seed(0)

    def stand_in(tensor: Tensor) -> Tensor:
        shape = count, *tensor.shape[1:]
        if tensor.is_floating_point() or tensor.is_complex():
            found = torch.randn(shape, generator=generator, dtype=tensor.dtype)
        else:
            found = torch.randint(2, shape, generator=generator).to(tensor.dtype)
        return found.to(tensor.device)

    return on_tensors(one, stand_in)


def on_last(batch: Any) -> Any:
    """A batch whose last sample has the content of its first."""
    return on_tensors(batch, lambda each: torch.cat([each[:-1], each[:1]]))


@contextmanager
def off_start(parameters: Sequence[Tensor]) -> Iterator[None]:
    """In this context parameters are moved: one that starts at zero hides those behind it."""
    before = [each.detach().clone() for each in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        for each, own in zip(parameters, before, strict=True):
            rms = float(own.norm()) / math.sqrt(max(1, own.numel()))
            noise = torch.randn(own.shape, generator=generator).to(own.device)
            each.detach().add_(noise, alpha=_BY * (rms if rms > _LEAST else 1.0))
        yield
    finally:
        for each, own in zip(parameters, before, strict=True):
            each.detach().copy_(own)
