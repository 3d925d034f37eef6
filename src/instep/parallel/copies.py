"""Copies of a model, for trials.

`torch.nn.utils.weight_norm` and `spectral_norm` leave the weight that they compute as an attribute,
which is part of a graph and which torch refuses to copy. Each forward pass computes it anew, so a
copy has its values alone. And an optimizer whose methods are hooks of the model (K-FAC) is copied
with all its attributes, of which torch's own copy leaves out most. A hook that closes
over the model closes over the copy there.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from instep.usercode.caches import rebind_caches
from instep.usercode.closures import rebind_functions

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
    memo, optimizers = computed_anew(model), _optimizers_in(model)
    memo |= {id(each): object.__new__(type(each)) for each in optimizers}
    try:
        for each in optimizers:
            vars(memo[id(each)]).update(copy.deepcopy(vars(each), memo))
    except Exception:  # an attribute that cannot be copied: as torch does, without it
        memo = computed_anew(model)
    made = copy.deepcopy(given, memo)
    rebind_caches(memo)
    rebind_functions(memo)
    return made


def _optimizers_in(model: nn.Module) -> list[Optimizer]:
    """Find those that modules have as attributes, or methods of as hooks."""
    found = dict[int, Optimizer]()
    for module in model.modules():
        held = list(vars(module).values())
        for value in held + [
            each for hooks in held if isinstance(hooks, dict) for each in hooks.values()
        ]:
            each = getattr(value, "__self__", value)
            if isinstance(each, Optimizer):
                found[id(each)] = each
    return list(found.values())


def computed_anew(model: nn.Module) -> dict[int, Any]:
    """For a deep copy of a model: the values of what its passes compute anew, by identity."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
