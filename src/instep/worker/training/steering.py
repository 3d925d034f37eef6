"""Numbers that steer an update: those of an optimizer and of its scheduler.

Who changes them is not known here. Way in: `steering`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from instep.engine.update import Update
from instep.usercode.numbers import is_number, is_small_array
from instep.usercode.places import is_of_user, own_of, places

_DEEP, _ITEMS = 5, 300
"""How far a scheduler is looked through, and what is kept there."""

_LEFT_ALONE = Optimizer, Dataset, type, FunctionType, MethodType, ModuleType
Name = tuple[str, ...]
"""The way to a number, from the class of what has it; the last is for a person."""


def steering(update: Update) -> dict[Name, Any]:
    """Return what the optimizer and the scheduler of an update have now, to be compared.

    Of tensors, how often they were written to; of arrays, their bytes.
    """
    found = dict(_of_optimizer(update.optimizer))
    scheduler = update.scheduler
    if scheduler is not None:
        found |= _of_object(scheduler, (type(scheduler).__name__,), 0)
        if is_of_user(type(scheduler)):
            found |= _kept_by(scheduler, (type(scheduler).__name__,))
    return found


def named(name: Name) -> str:
    """Describe where a number is."""
    return f"{name[-1]!r} of {name[0]}"


def _of_optimizer(optimizer: Any) -> Iterator[tuple[Name, Any]]:
    waiting, seen = [optimizer], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind, own = type(each).__name__, own_of(each)
        waiting += [inner for inner in own.values() if isinstance(inner, Optimizer)]
        for number, group in enumerate(getattr(each, "param_groups", ())):
            for key, value in list(group.items()):
                if key == "params":
                    yield (kind, f"{number}", key), tuple(map(id, value))
                else:
                    yield from _of_value(value, (kind, f"{number}", str(key)), 0)
        for number, kept in enumerate(list(getattr(each, "state", {}).values())):
            if isinstance(kept, dict):
                for key, value in list(kept.items()):
                    if _counts(value):
                        yield (kind, "state", f"{number}", str(key)), _token(value)
        for key, value in list(own.items()):
            if _counts(value):
                yield (kind, "", str(key)), _token(value)


def _of_object(each: Any, name: Name, depth: int) -> Iterator[tuple[Name, Any]]:
    for key, value in list(own_of(each).items()):
        yield from _of_value(value, (*name, str(key)), depth + 1)


def _of_value(value: Any, name: Name, depth: int) -> Iterator[tuple[Name, Any]]:
    if _counts(value):
        yield name, _token(value)
    elif isinstance(value, FunctionType) and depth < _DEEP:
        yield from _kept_by(value, name)
    elif depth > _DEEP or isinstance(value, _LEFT_ALONE):
        return
    elif isinstance(value, (list, tuple, deque, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(islice(pairs, _ITEMS)):
            yield from _of_value(item, (*name[:-1], f"{key}", name[-1]), depth + 1)
    else:
        yield from _of_object(value, name, depth)


def _kept_by(keeper: Any, name: Name) -> Iterator[tuple[Name, Any]]:
    """Yield what a function closes over and reads from globals, such as that of a `LambdaLR`."""
    for number, place in enumerate(islice(places([keeper]), _ITEMS)):
        value, here = place.get(), (*name, f"{number}", place.name)
        if _counts(value) or type(value) in (list, dict):
            yield from _of_value(value, here, _DEEP)


def _counts(value: Any) -> bool:
    return is_number(value) or is_small_array(value) or type(value) is str or type(value) is Tensor


def _token(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)
