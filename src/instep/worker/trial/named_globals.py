"""Global variables that a user's function names, as they were before it was tried.

Copies of functions share globals. So a list that a loss fills there has what the trial gave it,
unless that is taken out again. Functions that it calls are not looked into.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.usercode.places import names_in

_HELD = list, dict, set, deque
_PLAIN = bool, int, float, str, Tensor, type(None)


class _KeptGlobal(NamedTuple):
    space: dict[str, Any]
    name: str
    value: Any
    as_it_was: Any


def globals_of(value: Any) -> dict[str, Any]:
    """Copies of the variables that a function, or the call of an object, names.

    Lists, dicts, sets and deques are copied, numbers, texts and tensors too; no others are there.
    """
    return {name: _copied(space[name]) for name, space in _named(value)}


@contextmanager
def unchanged_globals(*values: Any) -> Iterator[None]:
    """After this context those variables have what they had before."""
    kept = [
        _KeptGlobal(space, name, space[name], _copied(space[name]))
        for value in values
        for name, space in _named(value)
    ]
    try:
        yield
    finally:
        for space, name, value, before in kept:
            _put_back(value, before)
            space[name] = value


def _named(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = type(value)
    called = (
        kind.forward if isinstance(value, nn.Module) else getattr_static(kind, "__call__", None)
    )
    for function in (value, getattr(value, "__func__", None), called):
        if isinstance(function, FunctionType):
            space = function.__globals__
            for name in names_in(function.__code__):
                if name in space and isinstance(space[name], (*_HELD, *_PLAIN)):
                    yield name, space


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        with suppress(RuntimeError):  # it has another shape now
            value.detach().copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
