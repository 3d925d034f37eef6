"""Places where the user's code keeps something in Python.

Looked at are attributes of modules, of the user's objects and of their classes; and what functions
close over, read from their globals, have as defaults or as attributes.
"""

from __future__ import annotations

import dis
import gc
import sys
import sysconfig
import threading
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial, partialmethod, singledispatchmethod
from itertools import islice
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

import torch
from torch import nn
from torch.nn.modules import module as of_modules

_STDLIB = sysconfig.get_path("stdlib")
_DEEP, _FEW, _MOST = 8, 300, 20_000
"""From a keeper to what is looked at; items of what is walked into; places in all."""

_NAMESPACES = SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local
_WRAPPED = partial, property, staticmethod, classmethod, partialmethod, singledispatchmethod
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_OF_TORCH = frozenset(vars(nn.Module()))
_ITEMS = list, tuple, deque, set, frozenset
CACHE = type(lru_cache(lambda: None))
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
"""Types in which nothing is looked for."""


class KeptPlace(NamedTuple):
    """Where something is kept, and its name for a person."""

    holder: Any
    """A cell, a class, a dict (of an object's attributes, of globals, or of the user's), a list, or
    an object with slots."""
    key: Any
    name: str
    is_item: bool = False
    """Whether it is in a list, dict, tuple or set of the user's, so that no code has its name."""

    def get(self) -> Any:
        """Return what is there; None if nothing is."""
        space = self.space
        if type(space) is CellType:
            return space.cell_contents if is_filled(space) else None
        if issubclass(type(space), dict):
            return dict.get(space, self.key)
        if type(space) is MappingProxyType:
            return space.get(self.key)
        if issubclass(type(space), list):
            return space[self.key] if self.key < len(space) else None
        try:
            return object.__getattribute__(space, self.key)
        except AttributeError:
            return None

    @property
    def there(self) -> bool:
        """Whether there is such a place, or none yet."""
        return self.key in self.space if type(self.space) is dict else True

    def drop(self) -> None:
        """Let there be no such place."""
        self.holder.pop(self.key, None)

    def put(self, value: Any) -> None:
        """Let something be there."""
        if type(self.holder) is CellType:
            self.holder.cell_contents = value
        elif issubclass(type(self.holder), (dict, list)):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    @property
    def space(self) -> Any:
        """Return what refers to it: a cell, a mapping of names, or an object."""
        of_class = issubclass(type(self.holder), type)
        return vars(self.holder) if of_class else self.holder


def kept_by(keepers: Iterable[Any]) -> Iterator[Any]:
    """Yield what functions close over or read from globals, and what lists and dicts of it have."""
    for place in places(keepers):
        yield place.get()


def places(keepers: Iterable[Any], but: Iterable[Any] = ()) -> Iterator[KeptPlace]:
    """Find what keepers keep: functions, modules, and anything else of the user's.

    Args:
        keepers: where to begin.
        but: objects that are not looked at.
    """
    seen, left = set(map(id, but)), _MOST
    waiting = deque((keeper, 0, "") for keeper in keepers)
    while waiting and left:
        keeper, depth, name = waiting.popleft()
        kind = type(keeper)  # what an object says of its own class may be anything
        if kind is MethodType:
            waiting.append((keeper.__self__, depth, name))
            keeper, kind = keeper.__func__, type(keeper.__func__)
        if kind in _PLAIN or id(keeper) in seen or depth > _DEEP:
            continue
        seen.add(id(keeper))
        for place in islice(_kept_in(keeper, name), left):
            left -= 1
            yield place
            waiting.append((place.get(), depth + 1, place.name))
        waiting += [(each, depth + 1, name) for each in _referred_to(keeper)]


def _kept_in(keeper: Any, name: str) -> Iterator[KeptPlace]:
    """Find what a keeper, which is called `name`, has itself."""
    kind = type(keeper)
    if issubclass(kind, nn.Module):
        for prefix, module in keeper.named_modules():
            yield from _of_module(module, f"{prefix}." if prefix else "")
    elif issubclass(kind, torch.Tensor):
        yield from (KeptPlace(own_of(keeper), key, f"{name}.{key}") for key in own_of(keeper))
    elif kind is partial:
        given = dict(enumerate(keeper.args)) | keeper.keywords
        yield from (KeptPlace(given, key, f"partial.{key}") for key in given)
    elif kind is FunctionType or issubclass(kind, type):
        if not _of_a_library(keeper):
            yield from _of_function(keeper) if kind is FunctionType else _of_class(keeper)
    else:
        if issubclass(kind, (dict, *_ITEMS)):
            yield from _items(keeper, name)
        if kind in _NAMESPACES or is_of_user(kind):
            yield from _attributes(keeper, f"{kind.__name__}.")
            if (own := own_of(keeper)) or kind.__dictoffset__:
                yield KeptPlace({"": own}, "", kind.__name__)


def _referred_to(keeper: Any) -> Iterator[Any]:
    """Find what may keep something for it, and has no place of its own."""
    kind = type(keeper)
    if issubclass(kind, nn.Module):
        for module in keeper.modules():
            yield type(module)
            yield from (each for of in _HOOKS for each in getattr(module, of).values())
        for of in _HOOKS:  # of all modules
            yield from getattr(of_modules, f"_global{of}", {}).values()
    elif kind is CACHE:
        yield from gc.get_referents(keeper)  # the function, and what it returned
    elif issubclass(kind, _WRAPPED):
        yield from _within(keeper)
    elif kind is not FunctionType and kind is not type and is_of_user(kind):
        yield kind  # a class, or that of a class


def returned(function: Any) -> Iterator[Any]:
    """Find what a function has returned that `functools.lru_cache` wraps, as far as it is kept."""
    for held in gc.get_referents(function):
        yield from held.values() if type(held) is dict else (held,)


def _items(keeper: Any, name: str) -> Iterator[KeptPlace]:
    """Items of a short list, dict, tuple or set that may keep something."""
    of_dict, own = issubclass(type(keeper), dict), issubclass(type(keeper), (dict, list))
    pairs = list[tuple[Any, Any]]()
    with suppress(Exception):  # the user's class may say anything of itself
        if len(keeper) <= _FEW:
            pairs = list(dict.items(keeper) if of_dict else enumerate(keeper))
    for key, item in pairs:
        if type(item) not in _PLAIN:
            yield KeptPlace(keeper if own else {key: item}, key, name + _index(key), True)


def _index(key: Any) -> str:
    return f"[{key!r}]" if isinstance(key, (int, str)) else "[...]"


def _of_module(module: nn.Module, path: str) -> Iterator[KeptPlace]:
    yield from _attributes(module, path)
    for own in (module._parameters, module._buffers):
        yield from (KeptPlace(own, key, path + key) for key in own)


def _within(keeper: Any) -> Iterator[Any]:
    if isinstance(keeper, property):
        yield from (keeper.fget, keeper.fset)
    elif isinstance(keeper, singledispatchmethod):
        yield from keeper.dispatcher.registry.values()
    else:
        yield keeper.func if isinstance(keeper, (partial, partialmethod)) else keeper.__func__


def _attributes(keeper: Any, path: str) -> Iterator[KeptPlace]:
    """Attributes: all of a user's object; of a library's, numbers and what is not its affair."""
    private, own = is_of_user(type(keeper)), own_of(keeper)
    of_torch = _OF_TORCH if isinstance(keeper, nn.Module) else ()
    for key, value in list(own.items()):
        if type(key) is not str or (key[:1] == "_" and key in of_torch):
            continue
        if key[:1] != "_" or private or type(value) in (int, float):
            yield KeptPlace(own, key, path + key)
    if private:
        yield from (KeptPlace(keeper, name, path + name) for name in _slots(type(keeper)))


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name[:2] != "__":
                yield name


def _of_function(function: FunctionType) -> Iterator[KeptPlace]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from (KeptPlace(cell, "", name) for name, cell in cells if is_filled(cell))
    space, names = function.__globals__, names_in(function.__code__)
    read = {name: space[name] for name in sorted(names & space.keys())}
    yield from (KeptPlace(space, name, name) for name in read)
    set_later = operands(function.__code__, "STORE_GLOBAL") - read.keys()
    yield from (KeptPlace(space, name, name) for name in sorted(set_later))
    modules_in = operands(function.__code__, "IMPORT_NAME")
    imported = {name: sys.modules.get(name) for name in sorted(modules_in)}
    modules = deque((read | imported).items())
    while modules:
        name, module = modules.popleft()
        if type(module) is ModuleType and not _in_a_library(vars(module).get("__name__")):
            for key in sorted(names & vars(module).keys()):
                yield KeptPlace(vars(module), key, f"{name}.{key}")
                if f"{module.__name__}.{key}" in sys.modules:  # of a package
                    modules.append((f"{name}.{key}", vars(module)[key]))
    of = f"{function.__name__}."
    yield from (KeptPlace(function.__dict__, name, of + name) for name in function.__dict__)
    yield KeptPlace({"": function.__dict__}, "", function.__name__)
    defaults: dict[Any, Any] = dict(enumerate(function.__defaults__ or ()))
    defaults |= function.__kwdefaults__ or {}
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    first = len(arguments) - len(function.__defaults__ or ())
    for key, value in defaults.items():
        if type(value) not in _PLAIN:  # only what can be changed there
            name = arguments[first + key] if isinstance(key, int) else key
            yield KeptPlace(defaults, key, of + name)


def _of_class(kind: type) -> Iterator[KeptPlace]:
    """The attributes of a user's class and of the user's classes that it inherits from."""
    for each in kind.__mro__:
        if is_of_user(each):
            for key, value in vars(each).items():
                if key[:2] != "__" or type(value) is FunctionType:
                    yield KeptPlace(each, key, f"{each.__name__}.{key}")


def own_of(keeper: Any) -> dict[Any, Any]:
    """Return the attributes of an object, if they lie where they usually do."""
    try:
        of_thread = issubclass(type(keeper), threading.local)
        own = keeper.__dict__ if of_thread else object.__getattribute__(keeper, "__dict__")
    except Exception:  # it has none
        return {}
    return own if type(own) is dict else {}


def names_in(code: CodeType) -> set[str]:
    """Find the globals and attributes that a function names, and those within it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(names_in, inner))


@lru_cache(1024)
def operands(code: CodeType, operation: str) -> frozenset[str]:
    """Find the names that an operation of a function has, and of those within it."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == operation}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*(operands(each, operation) for each in inner))


def is_of_user(kind: type) -> bool:
    """Check that a class is the user's."""
    return not _in_a_library(kind.__module__)


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


def is_filled(cell: CellType) -> bool:
    """Whether a function's cell holds something, and not itself."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
