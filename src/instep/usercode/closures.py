"""Functions that an object keeps and that close over a part of it, in copies of the object.

`copy.deepcopy` shares functions. A hook that leaves what a layer gave in an attribute of the model
would leave it in the original, and a copy that reads it there finds nothing. What else a function
closes over, it shares with its copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from instep.usercode.places import own_of


def rebind_functions(memo: Mapping[int, Any]) -> None:
    """Make functions in the copies that a deep copy has made close over the copies.

    Args:
        memo: of `copy.deepcopy`, after it.
    """
    for original in memo.get(id(memo), ()):  # where it keeps alive what it has copied
        copied = memo.get(id(original))
        held = original if isinstance(original, dict) else own_of(original)
        into = copied if isinstance(copied, dict) else own_of(copied)
        for name, function in held.items():
            if into.get(name) is function and isinstance(function, FunctionType):
                into[name] = _rebound(function, memo)


def _rebound(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    before = function.__closure__ or ()
    cells = tuple(_copy_of(cell, memo) for cell in before)
    if all(cell is own for cell, own in zip(cells, before, strict=True)):
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _copy_of(cell: CellType, memo: Mapping[int, Any]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    copied = memo.get(id(held), held)
    return cell if copied is held else CellType(copied)
