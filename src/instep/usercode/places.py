"""Places where the user's code keeps something in Python.

Looked at are attributes of modules, of the user's objects and of their classes; and what functions
close over, read from their globals, have as defaults or as attributes.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

from torch import nn

_STDLIB = sysconfig.get_path("stdlib")
_DEEP = 6

_NAMESPACES = SimpleNamespace, Namespace
_WRAPPED = partial, property, staticmethod, classmethod
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_OF_TORCH = frozenset(vars(nn.Module()))


class Place(NamedTuple):
    """Where something is kept, and its name for a person."""

    holder: Any
    """A cell, a class, a dict (of an object's attributes, of globals, or of defaults), or an object
    with slots."""
    key: Any
    name: str

    def get(self) -> Any:
        """Return what is there; None if nothing is."""
        space = self.space
        if type(space) is CellType:
            return space.cell_contents if _filled(space) else None
        if type(space) in (dict, MappingProxyType):
            return space.get(self.key)
        try:
            return object.__getattribute__(space, self.key)
        except AttributeError:
            return None

    def put(self, value: Any) -> None:
        """Let something be there."""
        if type(self.holder) is CellType:
            self.holder.cell_contents = value
        elif type(self.holder) is dict:
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    @property
    def space(self) -> Any:
        """Return what refers to it: a cell, a mapping of names, or an object."""
        of_class = issubclass(type(self.holder), type)
        return vars(self.holder) if of_class else self.holder


def kept_by(keepers: Iterable[Any]) -> Iterator[Any]:
    """Yield what functions close over or read from globals, and what dicts and lists of it have."""
    for place in places(keepers):
        value = place.get()
        many = value.values() if isinstance(value, dict) else value
        yield from many if isinstance(value, (dict, list, tuple)) else (value,)


def places(keepers: Iterable[Any]) -> Iterator[Place]:
    """Find what keepers keep: functions, modules, and anything else of the user's."""
    seen, waiting = set[int](), deque((keeper, 0) for keeper in keepers)
    while waiting:
        keeper, depth = waiting.popleft()
        kind = type(keeper)  # what an object says of its own class may be anything
        if kind is MethodType:
            waiting.append((keeper.__self__, depth))
            keeper, kind = keeper.__func__, type(keeper.__func__)
        if id(keeper) in seen or depth > _DEEP:
            continue
        seen.add(id(keeper))
        if issubclass(kind, nn.Module):
            for prefix, module in keeper.named_modules():
                for place in _attributes(module, f"{prefix}." if prefix else ""):
                    yield place
                    waiting.append((place.get(), depth + 1))
                hooks = (each for of in _HOOKS for each in getattr(module, of).values())
                waiting += [(each, depth + 1) for each in (type(module), *hooks)]
        elif issubclass(kind, _WRAPPED):
            if kind is partial:
                given = dict(enumerate(keeper.args)) | keeper.keywords
                yield from (Place(given, key, f"partial.{key}") for key in given)
            waiting.append((_within(keeper), depth))
        elif kind is FunctionType or issubclass(kind, type):
            if not _of_a_library(keeper):
                of = _of_function(keeper) if kind is FunctionType else _of_class(keeper)
                for place in of:
                    yield place
                    waiting.append((place.get(), depth + 1))
        elif kind in _NAMESPACES or not _of_a_library(kind):
            for place in _attributes(keeper, f"{kind.__name__}."):
                yield place
                waiting.append((place.get(), depth + 1))
            if own := _own(keeper):
                yield Place({"": own}, "", kind.__name__)
            waiting.append((kind, depth + 1))


def _within(
    keeper: partial[Any] | property | staticmethod[..., Any] | classmethod[Any, ..., Any],
) -> Any:
    if isinstance(keeper, partial):
        return keeper.func
    return keeper.fget if isinstance(keeper, property) else keeper.__func__


def _attributes(keeper: Any, path: str) -> Iterator[Place]:
    """All of a user's object; those of a library's object that are not its own affair."""
    private, own = not _of_a_library(type(keeper)), _own(keeper)
    of_torch = _OF_TORCH if isinstance(keeper, nn.Module) else ()
    for key in own:
        if type(key) is str and (key[:1] != "_" or (private and key not in of_torch)):
            yield Place(own, key, path + key)
    if private:
        yield from (Place(keeper, name, path + name) for name in _slots(type(keeper)))


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name[:2] != "__":
                yield name


def _of_function(function: FunctionType) -> Iterator[Place]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from (Place(cell, "", name) for name, cell in cells if _filled(cell))
    space, names = function.__globals__, names_in(function.__code__)
    read = {name: space[name] for name in sorted(names & space.keys())}
    yield from (Place(space, name, name) for name in read)
    imported = {name: sys.modules.get(name) for name in sorted(_imports_in(function.__code__))}
    for name, module in (read | imported).items():
        if type(module) is ModuleType and not _in_a_library(vars(module).get("__name__")):
            own = sorted(names & vars(module).keys())
            yield from (Place(vars(module), key, f"{name}.{key}") for key in own)
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
            for key, value in vars(each).items():
                if key[:2] != "__" or type(value) is FunctionType:
                    yield Place(each, key, f"{each.__name__}.{key}")


def _own(keeper: Any) -> dict[Any, Any]:
    """The attributes of an object, if they lie where they usually do."""
    try:
        own = object.__getattribute__(keeper, "__dict__")
    except Exception:  # it has none
        return {}
    return own if type(own) is dict else {}


def names_in(code: CodeType) -> set[str]:
    """Find the globals and attributes that a function names, and those within it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(names_in, inner))


@lru_cache(1024)
def _imports_in(code: CodeType) -> frozenset[str]:
    """Find the modules that a function imports, and those within it."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*map(_imports_in, inner))


def _of_a_library(made: FunctionType | type) -> bool:
    """Whether it is not the user's; what instep wraps around a user's function is looked into.

    A function that wraps another has the `__module__` of that one, and the globals of its own.
    """
    if isinstance(made, type):
        return _in_a_library(made.__module__)
    names = made.__module__, made.__globals__.get("__name__")
    return all(_in_a_library(name) and not str(name).startswith("instep.") for name in names)


def _in_a_library(module: object) -> bool:
    module = module if isinstance(module, str) else ""
    package = module.partition(".")[0]
    if package == "instep" or package in sys.stdlib_module_names:
        return True
    files = (getattr(sys.modules.get(name), "__file__", None) for name in (package, module))
    file = next(filter(None, files), "")
    return any(part in file for part in ("site-packages", "dist-packages", _STDLIB))


def modules_of_the_user() -> list[ModuleType]:
    """Return those imported from files that are no library's."""
    return [
        module
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None) and not _in_a_library(name)
    ]


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
