"""How far iterators and generators have come."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from instep.usercode.held import Items, OfObject, is_object
from instep.usercode.numbers import is_number

_FEW = 100
"""Items of a list or dict that are looked at in a generator."""


def reached(iterator: Any) -> tuple[Any, ...]:
    """Find how far a generator has come, or an iterator over others."""
    if type(iterator) is not GeneratorType:
        return tuple(_steps_of(iterator))
    frame = iterator.gi_frame
    if frame is None:
        return (-1,)
    local = [each for value in frame.f_locals.values() for each in _numbers_in(value)]
    # one that a loop goes over has no name
    loops = [
        each for one in gc.get_referents(iterator) if is_stepwise(one) for each in _steps_of(one)
    ]
    return frame.f_lasti, *local, *loops


def is_stepwise(value: Any) -> bool:
    """Whether it is an iterator of Python's or `itertools`."""
    kind = type(value)
    return issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")


def _steps_of(iterator: Any, deep: int = 3) -> Iterator[Any]:
    if type(iterator) is GeneratorType:
        yield from reached(iterator) if deep else ()
        return
    _, *parts = iterator.__reduce__()
    for part in parts:
        for each in part if isinstance(part, tuple) else (part,):
            if is_number(each):
                yield each
            elif isinstance(each, list):  # those that a cycle has passed
                yield len(each)
            elif is_stepwise(each) and deep:
                yield from _steps_of(each, deep - 1)


def _numbers_in(value: Any) -> Iterator[Any]:
    if is_number(value):
        yield value
    elif issubclass(type(value), (dict, list, tuple)) and len(value) <= _FEW:
        yield from filter(is_number, Items.of(value))
    elif is_object(value):
        yield from OfObject.of(value).numbers
