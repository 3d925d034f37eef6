"""Deep copies in which functions have copies of what they close over.

`copy.deepcopy` shares functions, so a call of a copied lambda still changes the object that the
original remembers. Here a function whose closure or defaults hold something is made anew, on
copies. What it finds in globals is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from instep.usercode.caches import rebind_caches


def isolated(values: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of values and of what the functions among them close over.

    Args:
        values: nested as you like.
        memo: as of `copy.deepcopy`: by identity, what stands for an object in the copy.

    Raises:
        Exception: of whatever kind, something cannot be copied.
    """
    functions: dict[int, FunctionType] = {}
    _find(values, functions, set(memo))
    anew: list[tuple[FunctionType, tuple[CellType, ...]]] = []
    for function in functions.values():  # first all, as they may refer to each other
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells or None
        )
        made.__dict__.update(function.__dict__)
        memo[id(function)] = made
        anew.append((function, cells))
    for function, cells in anew:
        made = memo[id(function)]
        made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            try:
                held = own.cell_contents
            except ValueError:  # not filled yet
                continue
            cell.cell_contents = copy.deepcopy(held, memo)
    made = copy.deepcopy(values, memo)
    rebind_caches(memo)
    return made


def closed_over(values: Any) -> list[Any]:
    """What the functions among some values close over, each cell's and default's content."""
    functions: dict[int, FunctionType] = {}
    _find(values, functions, set())
    held = list[Any]()
    for function in functions.values():
        defaults, named, *cells = _inside(function)
        held += [*(defaults or ()), *(named or {}).values(), *cells]
    return held


def _find(value: Any, functions: dict[int, FunctionType], seen: set[int]) -> None:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, Tensor, str, bytes, int)):
            continue
        seen.add(id(value))
        function = value if isinstance(value, FunctionType) else None
        if function and (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
            functions[id(value)] = function
        waiting.extend(_inside(value))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    else:
        yield getattr(value, "__dict__", None)
