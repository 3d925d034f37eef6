"""Intercepts calls of a model's modules, from outside of all that the modules do when called.

A module gets a class of its own, a subclass of its old one with another `__call__`, and its old
class back afterwards. A hook would run inside of activation checkpoints and compiled blocks; this
does not. What the calls are for is not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Handle = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the module's name, what runs the call as it is, and the call's arguments."""


@contextmanager
def intercepted(modules: Mapping[str, nn.Module], handle: Handle) -> Iterator[None]:
    """In this context every call of one of these modules is what `handle` makes of it."""
    before = {name: module.__class__ for name, module in modules.items()}
    try:
        for name, module in modules.items():
            run = functools.partial(before[name].__call__, module)
            module.__dict__["_intercept"] = functools.partial(handle, name, run)
            kind: Any = before[name]
            object.__setattr__(module, "__class__", _watched(kind))  # nn.Module's own is slow
        yield
    finally:
        for name, module in modules.items():
            object.__setattr__(module, "__class__", before[name])
            module.__dict__.pop("_intercept", None)


@functools.cache
def _watched(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_intercept"](args, kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__call__": call}
    return type(kind.__name__, (kind,), names)
