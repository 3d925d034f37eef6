"""Whether two values are the same to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NEAR = 1e-6
"""Relative; less is rounding."""


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        gap = abs(one - other)
        return one == other or gap <= NEAR * abs(one) or (one != one and other != other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _near(one.detach(), other.detach())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def _near(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, one - other)
    return bool(gap.norm() <= NEAR * one.nan_to_num().norm())
