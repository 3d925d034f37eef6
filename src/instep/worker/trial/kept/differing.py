"""Attributes that one object has with other values than another one that should be its equal.

Numbers, texts, tensors, generators and what holds them are compared: lists, dicts, plain objects,
and what functions close over. Of anything else nothing is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NEAR = 1e-6
"""Relative; less is rounding."""

_OF_TORCH = frozenset(
    (
        *("state", "param_groups", "defaults", "optimizer", "_step_count", "_is_initial"),
        *("_get_lr_called_within_step", "_last_lr", "_zero_grad_profile_name"),
        *("_warned_capturable_if_run_uncaptured", "_step_supports_amp_scaling"),
    )
)
"""Attributes of its optimizers and schedulers that `state_dict()` has, or that decide nothing."""

_LEFT_ALONE = type, ModuleType, MethodType, Optimizer


def other_values(one: Any, other: Any) -> list[str]:
    """The names of attributes of `one` that have other values in `other`."""
    return list(_other_names(vars(one), vars(other), {id(one)}))


def differ(one: Any, other: Any) -> bool:
    """Whether something in `one` has another value in `other`."""
    return _differ(one, other, set())


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


def _other_names(one: Mapping[str, Any], other: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    for name, value in one.items():
        if name in _OF_TORCH or name.startswith("_opt"):
            continue
        if _differ(value, other.get(name), seen):
            yield name


def _differ(one: Any, other: Any, seen: set[int]) -> bool:
    if isinstance(one, (bool, int, float, str)):
        return type(one) is not type(other) or not equal(one, other)
    if one is None or isinstance(one, _LEFT_ALONE) or id(one) in seen:
        return False
    seen.add(id(one))
    if isinstance(one, Tensor):
        return not isinstance(other, Tensor) or not equal(one, other)
    if isinstance(one, torch.Generator):
        known = isinstance(other, torch.Generator)
        return not known or not torch.equal(one.get_state(), other.get_state())
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or len(one) != len(other):
            return True
        by_name = one.keys() == other.keys()
        pairs = [(one[k], other[k]) for k in one] if by_name else _pairs(one, other)
        return any(_differ(*pair, seen) for pair in pairs)
    if isinstance(one, (list, tuple, deque, set, frozenset)):
        if not isinstance(other, type(one)) or len(one) != len(other):
            return True
        if isinstance(one, (set, frozenset)):
            return False
        return any(_differ(*pair, seen) for pair in zip(one, other, strict=True))
    if type(one) is not type(other):
        return other is None
    if isinstance(one, FunctionType):
        return any(_differ(*pair, seen) for pair in zip(_held(one), _held(other), strict=False))
    if isinstance(one, partial):
        return any(_differ(mine, theirs, seen) for mine, theirs in _parts(one, other))
    own, their = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    return any(True for _ in _other_names(own, their, seen))


def _pairs(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """By their order, where keys are parameters."""
    return zip(one.values(), other.values(), strict=True)


def _parts(one: partial[Any], other: partial[Any]) -> list[tuple[Any, Any]]:
    return [(one.func, other.func), (one.args, other.args), (one.keywords, other.keywords)]


def _held(function: FunctionType) -> list[Any]:
    """What a function closes over."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return found
