"""Copies of a model, for trials.

`torch.nn.utils.weight_norm` and `spectral_norm` leave the weight that they compute as an attribute,
which is part of a graph and which torch refuses to copy. Each forward pass computes it anew, so a
copy has its values alone.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

Given = TypeVar("Given")


def copied(given: Given, *, of: nn.Module | None = None) -> Given:
    """A deep copy of a model, or of what holds it.

    Args:
        given: to copy.
        of: the model, where `given` is not it.

    Raises:
        Exception: of whatever kind, something in it cannot be copied.
    """
    model = given if of is None else of
    assert isinstance(model, nn.Module)
    return copy.deepcopy(given, computed_anew(model))


def computed_anew(model: nn.Module) -> dict[int, Any]:
    """For a deep copy of a model: the values of what its passes compute anew, by identity."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
