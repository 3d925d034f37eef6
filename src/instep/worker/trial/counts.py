"""Numbers in Python that a pass changes: what a loss or a model counts from call to call.

They may decide what happens only later, after a warm-up say, where no trial comes. A run calls a
loss once for each micro-batch, and no checkpoint has such numbers. Looked at are attributes of
modules, of the user's objects and of their classes; and what functions close over, read from their
globals, have as defaults or as attributes: numbers, counters of `itertools`, and short lists and
dicts of numbers.
"""

from __future__ import annotations

import copy
import itertools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from instep.worker.trial.unread import unread

_STDLIB = sysconfig.get_path("stdlib")
_SHORT, _LONG, _DEEP = 8, 10_000, 6
_HELD = list, dict, set, deque

_WRAPPED = partial, property, staticmethod, classmethod
_OF_TORCH = frozenset(vars(nn.Module()))


class _Place(NamedTuple):
    """Where a number is kept, and its name for a person."""

    holder: Any
    """A cell, a class, or a dict: of an object's attributes, of globals, or of defaults."""
    key: Any
    name: str

    def get(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return _space(self.holder).get(self.key)

    def put(self, value: Any) -> None:
        kept = self.get()
        if isinstance(kept, _HELD) and type(kept) is type(value):
            kept.clear()
            kept.update(value) if isinstance(kept, (dict, set)) else kept.extend(value)
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


class Counts:
    """The numbers that some functions, modules and classes keep, as they are now.

    What else their lists, dicts, sets and deques hold is restored too; of that, only another length
    is a change: a memory that grows, and that something reads.

    Args:
        keepers: functions, modules, or anything else, of which nothing is looked at.
    """

    def __init__(self, keepers: Iterable[Any]) -> None:
        self._kept = [
            (place, copy.copy(value))
            for place in _places(keepers)
            if _counts(value := place.get()) or _holds(value)
        ]

    def changed(self) -> str:
        """The name of the first number, or memory, that is another by now; empty if none is."""
        for place, kept in self._kept:
            now = place.get()
            grown = isinstance(kept, _HELD) and isinstance(now, _HELD) and len(now) != len(kept)
            if (grown and not self._unread(now)) or (
                not grown and _counts(kept) and not _same(now, kept)
            ):
                return place.name
        return ""

    def put_back(self) -> None:
        """Restore all numbers, and what is held."""
        for place, kept in self._kept:
            if not _same(place.get(), kept):
                place.put(copy.copy(kept))

    def _unread(self, memory: Any) -> bool:
        it = id(memory)  # a cell of this function would be one more that refers to it
        places = [place for place, _ in self._kept if id(place.get()) == it]
        names = [place.key or place.name for place in places]
        holders = [
            place.holder if isinstance(place.holder, CellType) else _space(place.holder)
            for place in places
        ]
        return (
            not isinstance(memory, dict)
            and all(isinstance(name, str) for name in names)
            and unread(memory, list(zip(holders, names, strict=True)), _modules_of_the_user())
        )


@contextmanager
def unchanged(*keepers: Any) -> Iterator[None]:
    """After this context they keep what they kept before."""
    counts = Counts(keepers)
    try:
        yield
    finally:
        counts.put_back()


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
                yield from (_Place(given, key, f"partial.{key}") for key in given)
            waiting.append((_within(keeper), depth))
        elif isinstance(keeper, (FunctionType, type)):
            if not _of_a_library(keeper):
                of = _of_class(keeper) if isinstance(keeper, type) else _of_function(keeper)
                for place in of:
                    yield place
                    waiting.append((place.get(), depth + 1))
        elif not _of_a_library(type(keeper)):
            yield from _attributes(keeper, f"{type(keeper).__name__}.")
            if hasattr(keeper, "__dict__"):
                yield _Place({"": vars(keeper)}, "", type(keeper).__name__)
            waiting.append((type(keeper), depth + 1))


def _within(
    keeper: partial[Any] | property | staticmethod[..., Any] | classmethod[Any, ..., Any],
) -> Any:
    if isinstance(keeper, partial):
        return keeper.func
    return keeper.fget if isinstance(keeper, property) else keeper.__func__


def _attributes(keeper: Any, path: str) -> Iterator[_Place]:
    """All of a user's object; those of a library's object that are not its own affair."""
    private = not _of_a_library(type(keeper))
    own = getattr(keeper, "__dict__", {})
    of_torch = _OF_TORCH if isinstance(keeper, nn.Module) else ()
    for key in own:
        if key[:1] != "_" or (private and key not in of_torch):
            yield _Place(own, key, path + key)


def _of_function(function: FunctionType) -> Iterator[_Place]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from (_Place(cell, "", name) for name, cell in cells if _filled(cell))
    space = function.__globals__
    names = {*function.__code__.co_names} & space.keys()
    yield from (_Place(space, name, name) for name in sorted(names))
    of = f"{function.__name__}."
    yield from (_Place(function.__dict__, name, of + name) for name in function.__dict__)
    yield _Place({"": function.__dict__}, "", function.__name__)
    defaults: dict[Any, Any] = dict(enumerate(function.__defaults__ or ()))
    defaults |= function.__kwdefaults__ or {}
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    first = len(arguments) - len(function.__defaults__ or ())
    for key, value in defaults.items():
        if isinstance(value, (list, dict)):  # only what can be changed there
            name = arguments[first + key] if isinstance(key, int) else key
            yield _Place(defaults, key, of + name)


def _of_class(kind: type) -> Iterator[_Place]:
    """The attributes of a user's class and of the user's classes that it inherits from."""
    for each in kind.__mro__:
        if not _of_a_library(each):
            own = [key for key in vars(each) if not key.startswith("__") or key == "__call__"]
            yield from (_Place(each, key, f"{each.__name__}.{key}") for key in own)


def _space(holder: Any) -> MappingProxyType[str, Any] | dict[Any, Any]:
    return vars(holder) if isinstance(holder, type) else holder


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


def _modules_of_the_user() -> list[ModuleType]:
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


def _counts(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= _SHORT and all(map(_is_number, value.values()))
    if isinstance(value, list):
        return len(value) <= _SHORT and all(map(_is_number, value))
    return _is_number(value) or isinstance(value, itertools.count)


def _holds(value: Any) -> bool:
    return isinstance(value, _HELD) and len(value) <= _LONG


def _same(one: Any, kept: Any) -> bool:
    """Whether a number is what it was, and whether what is held are the same objects."""
    if type(one) is not type(kept):
        return False
    if not isinstance(kept, _HELD):
        return bool(_shown(one) == _shown(kept))
    if len(one) != len(kept):
        return False
    if isinstance(kept, set):
        return bool(one == kept)
    if isinstance(kept, dict):
        return all(name in one and _alike(one[name], value) for name, value in kept.items())
    return all(map(_alike, one, kept))


def _alike(one: Any, kept: Any) -> bool:
    return one is kept or (_is_number(one) and bool(one == kept))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _shown(value: Any) -> Any:
    return repr(value) if isinstance(value, itertools.count) else value
