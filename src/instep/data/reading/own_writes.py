"""Which attributes a dataset sets itself when a sample is read, as its code says.

A shard that is kept until another is needed, an index that the first read builds: each process
that reads has its own. So they are told to no other, and are nothing that the user's loop has set.
Code is only looked at, never called. Way in: `set_by_reading`.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

_ENTRIES = ("__getitem__", "__getitems__", "__len__", "__iter__", "__next__", "__call__", "forward")
"""What a reader calls, of a dataset and of what it is made of."""

_NEVER = ("__init__", "__new__")


def set_by_reading(kinds: Iterable[type]) -> dict[type, frozenset[str]]:
    """Names of attributes, by class.

    Args:
        kinds: of a dataset and of the objects that it is made of. Methods are followed by their
            names, through all of these classes.
    """
    kinds = list(dict.fromkeys(kinds))
    found: dict[type, set[str]] = {kind: set() for kind in kinds}
    known, waiting = {*_ENTRIES, *_NEVER}, list(_ENTRIES)
    while waiting:
        name = waiting.pop()
        for kind in kinds:
            for owner in kind.__mro__:
                member = vars(owner).get(name)
                if isinstance(member, cached_property):
                    found[kind].add(name)
                for code in _codes(member):
                    called, written = _names(code)
                    found[kind] |= written
                    waiting += called - known
                    known |= called
    return {kind: frozenset(names) for kind, names in found.items()}


def _codes(member: Any) -> Iterator[CodeType]:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    while member is not None:
        if isinstance(member, FunctionType):
            yield from _within(member.__code__)
        member = inspect.getattr_static(member, "__wrapped__", None)  # of a decorator


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _within(each)


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The names that code uses, and those of attributes that it sets."""
    written = {
        str(each.argval)
        for each in dis.get_instructions(code)
        if each.opname in ("STORE_ATTR", "DELETE_ATTR")
    }
    return {*code.co_names}, written
