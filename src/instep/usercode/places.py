"""Places where the user's code keeps something in Python.

Looked at are attributes of modules, of the user's objects and of their classes; and what functions
close over, read from their globals, have as defaults or as attributes.
"""

from __future__ import annotations

import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

_STDLIB = sysconfig.get_path("stdlib")
_DEEP = 6

_NAMESPACES = SimpleNamespace, Namespace
_WRAPPED = partial, property, staticmethod, classmethod
_OF_TORCH = frozenset(vars(nn.Module()))


class Place(NamedTuple):
    """Where something is kept, and its name for a person."""

    holder: Any
    """A cell, a class, or a dict: of an object's attributes, of globals, or of defaults."""
    key: Any
    name: str

    def get(self) -> Any:
        """Return what is there; None if nothing is."""
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return self.space.get(self.key)

    def put(self, value: Any) -> None:
        """Let something be there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value

    @property
    def space(self) -> Any:
        """Return what refers to it: a cell, or a mapping of names."""
        return vars(self.holder) if isinstance(self.holder, type) else self.holder


def kept_by(keepers: Iterable[Any]) -> Iterator[Any]:
    """Yield what functions close over or read from globals, and what dicts and lists of it have."""
    for place in places(keepers):
        value = place.get()
        many = value.values() if isinstance(value, dict) else value
        yield from many if isinstance(value, (dict, list, tuple)) else (value,)


def places(keepers: Iterable[Any]) -> Iterator[Place]:
    """Find what keepers keep: functions, modules, and anything else of the user's."""
    seen, waiting = set[int](), [(keeper, 0) for keeper in keepers]
    while waiting:
        keeper, depth = waiting.pop(0)
        if isinstance(keeper, MethodType):
            waiting.append((keeper.__self__, depth))
            keeper = keeper.__func__
        if id(keeper) in seen or depth > _DEEP:
            continue
        seen.add(id(keeper))
        if isinstance(keeper, nn.Module):
            for prefix, module in keeper.named_modules():
                yield from _attributes(module, f"{prefix}." if prefix else "")
                hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
                waiting += [(each, depth + 1) for each in (type(module), *hooks)]
        elif isinstance(keeper, _WRAPPED):
            if isinstance(keeper, partial):
                given = dict(enumerate(keeper.args)) | keeper.keywords
                yield from (Place(given, key, f"partial.{key}") for key in given)
            waiting.append((_within(keeper), depth))
        elif isinstance(keeper, (FunctionType, type)):
            if not _of_a_library(keeper):
                of = _of_class(keeper) if isinstance(keeper, type) else _of_function(keeper)
                for place in of:
                    yield place
                    waiting.append((place.get(), depth + 1))
        elif isinstance(keeper, _NAMESPACES) or not _of_a_library(type(keeper)):
            yield from _attributes(keeper, f"{type(keeper).__name__}.")
            if hasattr(keeper, "__dict__"):
                yield Place({"": vars(keeper)}, "", type(keeper).__name__)
            waiting.append((type(keeper), depth + 1))


def _within(
    keeper: partial[Any] | property | staticmethod[..., Any] | classmethod[Any, ..., Any],
) -> Any:
    if isinstance(keeper, partial):
        return keeper.func
    return keeper.fget if isinstance(keeper, property) else keeper.__func__


def _attributes(keeper: Any, path: str) -> Iterator[Place]:
    """All of a user's object; those of a library's object that are not its own affair."""
    private = not _of_a_library(type(keeper))
    own = getattr(keeper, "__dict__", {})
    of_torch = _OF_TORCH if isinstance(keeper, nn.Module) else ()
    for key in own:
        if key[:1] != "_" or (private and key not in of_torch):
            yield Place(own, key, path + key)


def _of_function(function: FunctionType) -> Iterator[Place]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from (Place(cell, "", name) for name, cell in cells if _filled(cell))
    space = function.__globals__
    names = {*function.__code__.co_names} & space.keys()
    yield from (Place(space, name, name) for name in sorted(names))
    of = f"{function.__name__}."
    yield from (Place(function.__dict__, name, of + name) for name in function.__dict__)
    yield Place({"": function.__dict__}, "", function.__name__)
    defaults: dict[Any, Any] = dict(enumerate(function.__defaults__ or ()))
    defaults |= function.__kwdefaults__ or {}
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    first = len(arguments) - len(function.__defaults__ or ())
    for key, value in defaults.items():
        if isinstance(value, (list, dict)):  # only what can be changed there
            name = arguments[first + key] if isinstance(key, int) else key
            yield Place(defaults, key, of + name)


def _of_class(kind: type) -> Iterator[Place]:
    """The attributes of a user's class and of the user's classes that it inherits from."""
    for each in kind.__mro__:
        if not _of_a_library(each):
            own = [key for key in vars(each) if not key.startswith("__") or key == "__call__"]
            yield from (Place(each, key, f"{each.__name__}.{key}") for key in own)


def _of_a_library(made: FunctionType | type) -> bool:
    """Whether it is not the user's; what instep wraps around a user's function is looked into."""
    name = made.__module__ or ""
    if name.startswith("instep."):
        return isinstance(made, type)
    return _in_a_library(name)


def _in_a_library(module: str) -> bool:
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return True
    files = (getattr(sys.modules.get(name), "__file__", None) for name in (package, module))
    file = next(filter(None, files), "")
    return any(part in file for part in ("site-packages", "dist-packages", _STDLIB))


def modules_of_the_user() -> list[ModuleType]:
    """Return those imported from files that are no library's."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] != "instep"
        and getattr(module, "__file__", None)
        and not _in_a_library(name)
    ]


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
