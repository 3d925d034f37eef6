"""What can be noticed of a dataset's objects: their attributes, and whether those have changed.

Who has changed them is not known here. Ways in: `objects_of`, `snapshot`, `same`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from instep.data.reading.own_writes import attributes

_OBJECTS, _DEPTH, _ITEMS = 64, 4, 64
"""How far a dataset is looked through: for its own parts, not for its samples."""

_BYTES, _NUMBERS = 1 << 16, 1 << 13
"""Up to how many bytes of an array, and items of what else is no tensor, changes are noticed."""

_ATOMS = (type(None), bool, int, float, str)
_LEAVES = (*_ATOMS, type, ModuleType, FunctionType, MethodType, torch.Tensor, np.ndarray)


def objects_of(dataset: Any) -> Iterator[Any]:
    """The dataset and the objects that it is made of, such as its transforms."""
    found: dict[int, Any] = {}
    waiting = [(dataset, 0)]
    while waiting and len(found) < _OBJECTS:
        each, depth = waiting.pop(0)
        if id(each) in found or isinstance(each, _LEAVES) or depth > _DEPTH:
            continue
        if isinstance(each, (list, tuple)):
            waiting += [(item, depth + 1) for item in each] if len(each) <= _ITEMS else []
            continue
        root = type(each).__module__.partition(".")[0]
        slots = hasattr(type(each), "__slots__") and root not in sys.stdlib_module_names
        if not (slots or hasattr(each, "__dict__")) or root == "instep":
            continue
        found[id(each)] = each
        waiting += [(value, depth + 1) for value in attributes(each).values()]
    yield from found.values()


def is_simple(value: Any) -> bool:
    """Whether a value can be sent to another process: a number, a string, or a few of them."""
    if isinstance(value, (list, tuple)):
        return len(value) <= _ITEMS and all(type(item) in _ATOMS for item in value)
    return type(value) in _ATOMS


def is_setting(value: Any) -> bool:
    """Whether a loop may have set this, rather than a first read: numbers, or what is called.

    An open file or database is none, nor are the entries that a reader has found in it.
    """
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(item, _LEAVES) or is_setting(item) for item in items)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    return callable(value) and hasattr(value, "__dict__")


class AttributeSeen(NamedTuple):
    """An object that an attribute had, and what says whether it was written to."""

    value: Any
    state: Any


def snapshot(each: Any) -> dict[str, Any]:
    """An object and what says whether it was written to, of each attribute."""
    return {name: AttributeSeen(value, _state(value)) for name, value in attributes(each).items()}


def is_shared(value: Any) -> bool:
    """Whether a value lies in memory that other processes see too."""
    return isinstance(value, Synchronized)


def _state(value: Any) -> Any:
    if is_shared(value):
        return value.get_obj().value  # whoever holds its lock may be dead
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _BYTES and not value.dtype.hasobject
        return zlib.crc32(value.tobytes()) if small else None
    if type(value) in (set, dict, list) and not is_simple(value):
        return _state_of_items(value)
    if isinstance(value, (list, tuple)):
        return tuple(value) if is_simple(value) else len(value)
    return None


def _state_of_items(value: set[Any] | dict[Any, Any] | list[Any]) -> Any:
    """Of numbers and strings; None where there are others, which may be a cache that grows."""
    otherwise = len(value) if isinstance(value, list) else None
    if len(value) > _NUMBERS:
        return otherwise
    items = [*value, *value.values()] if isinstance(value, dict) else [*value]
    if not {*map(type, items)} <= {*_ATOMS}:
        return otherwise
    return hash(frozenset(items) if isinstance(value, set) else tuple(items))


def same(before: Any, now: Any) -> bool:
    """Whether an attribute was left as it was, by what `snapshot` gave before and now."""
    (old, old_state), (new, new_state) = before, now
    if type(old) in _ATOMS or is_simple(new):
        return type(old) is type(new) and repr(old_state or old) == repr(new_state or new)
    return old is new and bool(old_state == new_state)
