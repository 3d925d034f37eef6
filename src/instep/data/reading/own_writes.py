"""Which attributes a dataset sets itself when a sample is read, as its code says.

A shard that is kept until another is needed, an index that the first read builds: each process
that reads has its own. So they are told to no other, and are nothing that the user's loop has set.
Only what is set on `self` counts, in the methods that a reader calls and in those that these call
on `self` and on the dataset's own parts. Code is only looked at, never called.
Ways in: `set_by_reading`, `codes_of_reading`.
"""

from __future__ import annotations

import dis
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

_ENTRIES = ("__getitem__", "__getitems__", "__len__", "__iter__", "__next__", "__call__", "forward")
"""What a reader calls, of a dataset and of what it is made of."""

_NEVER = ("__init__", "__new__")

_PARTS = 64
"""Items of a list that are looked at for their classes."""


class Writes(NamedTuple):
    """How reading uses the attributes of a class."""

    set: frozenset[str]
    """Names of those that it sets."""
    looked_at: frozenset[str]
    """Of those that it reads items of, and never changes in place."""


def set_by_reading(objects: Iterable[Any]) -> dict[type, Writes]:
    """What reading sets, and what it only looks at, by class.

    Args:
        objects: a dataset and the objects that it is made of.
    """
    objects = list(objects)
    kinds = list(dict.fromkeys(type(each) for each in objects))
    parts = _parts(objects, kinds)
    written: dict[type, set[str]] = {kind: set() for kind in kinds}
    loaded: dict[type, set[str]] = {kind: set() for kind in kinds}
    changed: dict[type, set[str]] = {kind: set() for kind in kinds}
    waiting = [(kind, name) for kind in kinds for name in _ENTRIES]
    known = {*waiting, *((kind, name) for kind in kinds for name in _NEVER)}
    while waiting:
        kind, name = waiting.pop()
        for member in _members(kind, name):
            if isinstance(member, cached_property):
                written[kind].add(name)
            for code, self in _codes(member):
                found = _Uses(code, self)
                written[kind] |= found.stored
                loaded[kind] |= found.used
                changed[kind] |= found.changed
                calls = {(kind, used) for used in found.used}
                for part, used, only_read in found.of_parts:
                    for each in parts[kind, part]:
                        calls.add((each, used))
                        loaded[each].add(used)
                        changed[each] |= set() if only_read else {used}
                for part, stored in found.stored_in_parts:
                    for each in parts[kind, part]:
                        written[each].add(stored)
                waiting += calls - known
                known |= calls
    return {
        kind: Writes(frozenset(written[kind]), frozenset(loaded[kind] - changed[kind]))
        for kind in kinds
    }


def codes_of_reading(objects: Iterable[Any]) -> frozenset[CodeType]:
    """The code of the methods that a reader calls: what they call is reading."""
    kinds = dict.fromkeys(type(each) for each in objects)
    return frozenset(
        code
        for kind in kinds
        for name in _ENTRIES
        for member in _members(kind, name)
        for code, _ in _codes(member)
    )


def _members(kind: type, name: str) -> Iterator[Any]:
    for owner in kind.__mro__:
        if owner is not nn.Module and name in vars(owner):  # every model's calls go through it
            yield vars(owner)[name]


def _parts(objects: Iterable[Any], kinds: Iterable[type]) -> Mapping[tuple[type, str], set[type]]:
    known, parts = {*kinds}, defaultdict[tuple[type, str], set[type]](set)
    for each in objects:
        for name, value in attributes(each).items():
            items = value[:_PARTS] if isinstance(value, (list, tuple)) else [value]
            parts[type(each), name] |= {type(item) for item in items} & known
    return parts


def attributes(each: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots included."""
    found = dict(getattr(each, "__dict__", ()))
    for name in _slots(type(each)):  # type: ignore[arg-type]
        with suppress(AttributeError):
            found[name] = getattr(each, name)
    return found


@cache
def _slots(kind: type) -> tuple[str, ...]:
    every = [vars(owner).get("__slots__", ()) for owner in kind.__mro__]
    names = [name for some in every for name in ((some,) if isinstance(some, str) else some)]
    return tuple(name for name in names if not name.startswith("__"))


def _codes(member: Any) -> Iterator[tuple[CodeType, str]]:
    """Each code of a member, and the name of the object that it is a method of."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    elif isinstance(member, (classmethod, staticmethod)):
        return
    while member is not None:
        if isinstance(member, FunctionType):
            names = member.__code__.co_varnames[: max(1, member.__code__.co_argcount)]
            for code in _within(member.__code__):
                yield code, next(iter(names), "")
        member = inspect.getattr_static(member, "__wrapped__", None)  # of a decorator


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _within(each)


class _Uses:
    """How code uses the attributes of one object.

    Args:
        code: of a method.
        name: of the object in it, such as `self`.
    """

    def __init__(self, code: CodeType, name: str) -> None:
        self._self = name
        self.stored, self.used, self.changed = set[str](), set[str](), set[str]()
        self.of_parts, self.stored_in_parts = set[tuple[str, str, bool]](), set[tuple[str, str]]()
        whole = [each for each in dis.get_instructions(code) if each.opname not in _NOTHING]
        for number, each in enumerate(whole):
            before = whole[max(0, number - 4) : number]
            if "ATTR" in each.opname or each.opname == "LOAD_METHOD":
                self._take(each, before, whole[number + 1 : number + 3])

    def _take(
        self, each: dis.Instruction, before: list[dis.Instruction], after: list[dis.Instruction]
    ) -> None:
        name, loads = str(each.argval), each.opname.startswith("LOAD")
        last = before[-1] if before else None
        of_self = last is not None and self._is_self(last)
        twice = len(before) > 1 and last is not None and last.opname in ("COPY", "DUP_TOP")
        if twice and self._is_self(before[-2]):  # self.name += ...
            self.stored.add(name)
        elif of_self:
            (self.used if loads else self.stored).add(name)
            if loads and not _only_read(after):
                self.changed.add(name)
        elif last is not None and last.opname == "LOAD_ATTR":
            if len(before) > 1 and self._is_self(before[-2]):
                part = str(last.argval)
                if loads:
                    self.of_parts.add((part, name, _only_read(after)))
                else:
                    self.stored_in_parts.add((part, name))
        elif loads and ("SUPER" in each.opname or any(b.argval == "super" for b in before[-3:])):
            self.used.add(name)

    def _is_self(self, each: dis.Instruction) -> bool:
        if "LOAD_FAST" not in each.opname and each.opname != "LOAD_DEREF":
            return False
        name = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
        return bool(name == self._self)


_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL")


def _only_read(after: list[dis.Instruction]) -> bool:
    """Whether what follows takes items of a value, or asks whether it has one."""
    if not after:
        return False
    first, *others = after
    if first.opname in ("CONTAINS_OP", "GET_ITER", "BINARY_OP", "BINARY_SUBSCR"):
        return True
    simple = first.opname == "LOAD_CONST" or "LOAD_FAST" in first.opname
    return simple and any(
        each.opname == "BINARY_SUBSCR" or (each.opname == "BINARY_OP" and "[" in each.argrepr)
        for each in others[:1]
    )
