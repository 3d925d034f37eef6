"""Numbers in Python that a pass changes: what a loss or a model counts from call to call.

They may decide what happens only later, after a warm-up say, where no trial comes. A run calls a
loss once for each micro-batch, and no checkpoint has such numbers. Looked at are plain attributes
of modules, and what functions close over or read from their globals: numbers, counters of
`itertools`, and short lists and dicts of numbers.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

_SHORT, _DEEP = 8, 4


class _Place(NamedTuple):
    """Where a number is kept, and its name for a person."""

    holder: Any
    """A cell, or a dict: of a module's attributes, or of globals."""
    key: str
    name: str

    def get(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return self.holder.get(self.key)

    def put(self, value: Any) -> None:
        kept = self.get()
        if isinstance(kept, (list, dict)) and type(kept) is type(value):
            kept.clear()
            kept.extend(value) if isinstance(kept, list) else kept.update(value)
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class Counts:
    """The numbers that some functions and modules keep, as they are now.

    Args:
        keepers: functions, modules, or anything else, of which nothing is looked at.
    """

    def __init__(self, keepers: Iterable[Any]) -> None:
        self._kept = [
            (place, copy.copy(value)) for place in _places(keepers) if _counts(value := place.get())
        ]

    def changed(self) -> str:
        """The name of the first number that has another value by now; empty if none has."""
        for place, kept in self._kept:
            if _shown(place.get()) != _shown(kept):
                return place.name
        return ""

    def put_back(self) -> None:
        """Restore all numbers."""
        for place, kept in self._kept:
            if _shown(place.get()) != _shown(kept):
                place.put(copy.copy(kept))


def kept_by(keepers: Iterable[Any]) -> Iterator[Any]:
    """What functions close over or read from globals, and what dicts and lists of it have."""
    for place in _places(keepers):
        value = place.get()
        many = value.values() if isinstance(value, dict) else value
        yield from many if isinstance(value, (dict, list, tuple)) else (value,)


def _places(keepers: Iterable[Any]) -> Iterator[_Place]:
    seen, waiting = set[int](), [(keeper, 0) for keeper in keepers]
    while waiting:
        keeper, depth = waiting.pop(0)
        if isinstance(keeper, MethodType):
            keeper = keeper.__func__
        if id(keeper) in seen or depth > _DEEP:
            continue
        seen.add(id(keeper))
        if isinstance(keeper, nn.Module):
            for prefix, module in keeper.named_modules():
                path = f"{prefix}." if prefix else ""
                own = vars(module)
                yield from (_Place(own, key, path + key) for key in own if key[:1] != "_")
        elif isinstance(keeper, FunctionType) and not _of_a_library(keeper):
            for name, cell in zip(
                keeper.__code__.co_freevars, keeper.__closure__ or (), strict=True
            ):
                if _filled(cell):
                    yield _Place(cell, "", name)
                    waiting.append((cell.cell_contents, depth + 1))
            names = {*keeper.__code__.co_names} & keeper.__globals__.keys()
            for name in sorted(names):
                yield _Place(keeper.__globals__, name, name)
                waiting.append((keeper.__globals__[name], depth + 1))


def _of_a_library(function: FunctionType) -> bool:
    """Whether it is not the user's; what instep wraps around a user's function is looked into."""
    module = sys.modules.get(function.__module__ or "")
    if module is not None and module.__name__.startswith("instep."):
        return False
    file = getattr(module, "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _counts(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= _SHORT and all(map(_is_number, value.values()))
    if isinstance(value, list):
        return len(value) <= _SHORT and all(map(_is_number, value))
    return _is_number(value) or isinstance(value, itertools.count)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _shown(value: Any) -> Any:
    return repr(value) if isinstance(value, itertools.count) else value
