"""Numbers in Python that a pass, or the reading of a sample, changes: what is counted on the way.

They may decide what happens only later, after a warm-up say, where no trial comes. A run calls a
loss once for each micro-batch, each reader has a dataset of its own, and no checkpoint has such
numbers. Seen are numbers, counters and cycles of `itertools`, how far a generator has come, small
arrays and tensors that are no buffers, and short lists and dicts of numbers, at all `places`.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from instep.usercode.places import Place, modules_of_the_user, places
from instep.usercode.unread import unread

_SHORT, _LONG = 8, 10_000
_HELD = list, dict, set, deque
_ROUNDED = 1e-5
"""Relative: what the order of a GPU's sums may change."""


_ITERATORS = GeneratorType, itertools.cycle
"""That nobody can put back."""


class _Reached(NamedTuple):
    """How far a generator or a cycle has come."""

    place: int
    numbers: tuple[Any, ...]


class _Kept(NamedTuple):
    place: Place
    value: Any
    as_it_was: Any
    """A copy of the value, or itself if it cannot change."""

    def grown(self) -> bool:
        now, before = self.place.get(), self.as_it_was
        return isinstance(before, _HELD) and isinstance(now, _HELD) and len(now) != len(before)

    def changed(self) -> bool:
        return _counts(self.as_it_was) and not _same(self.place.get(), self.as_it_was)

    def put_back(self) -> None:
        if not _same(self.place.get(), self.as_it_was):
            self.place.put(_restored(self.value, self.as_it_was))


class Counts:
    """The numbers that some functions, modules and objects keep, as they are now.

    What else their lists, dicts, sets and deques hold is restored too; of that, only another length
    is a change: a memory that grows, and that something reads.

    Args:
        keepers: functions, modules, or anything else, of which nothing is looked at.
    """

    def __init__(self, keepers: Iterable[Any]) -> None:
        keepers = list(keepers)
        modules = [each for each in keepers if isinstance(each, nn.Module)]
        in_checkpoints = {id(each) for module in modules for each in module.buffers()}
        self._kept = [
            _Kept(place, value, _copied(value))
            for place in places(keepers)
            if id(value := place.get()) not in in_checkpoints and (_counts(value) or _holds(value))
        ]
        self._unset = [each for each in places(keepers) if each.get() is None]
        self._attributes = [
            (f"{path}." if path else "", vars(each), [*vars(each)])
            for module in modules
            for path, each in module.named_modules()
        ]

    def changed(self) -> str:
        """The name of the first number, or memory, that is another by now; empty if none is."""
        for each in self._kept:
            if not self._unread(each.place.get()) if each.grown() else each.changed():
                return each.place.name
        return ""

    def first_set(self) -> dict[str, Any]:
        """Copy what is set now and was not: numbers, small arrays and tensors, by name."""
        found = {place.name: place.get() for place in self._unset}
        for path, now, before in self._attributes:
            found |= {f"{path}{key}": now[key] for key in now.keys() - before}
        for each in self._kept:
            if each.grown() and isinstance(each.value, dict):
                held = each.place.get()
                new = held.keys() - each.as_it_was
                found |= {f"{each.place.name}.{key}": held[key] for key in new}
        return {name: _copied(value) for name, value in found.items() if _numeric(value)}

    def put_back(self) -> None:
        """Restore all numbers, and what is held."""
        for each in self._kept:
            each.put_back()
        for place in self._unset:
            if place.get() is not None:
                place.put(None)
        for _, now, before in self._attributes:
            for key in now.keys() - before:
                del now[key]

    def _unread(self, memory: Any) -> bool:
        it = id(memory)  # a cell of this function would be one more that refers to it
        every = [each.place for each in self._kept if id(each.place.get()) == it]
        named = [(place.space, place.key or place.name) for place in every]
        return (
            not isinstance(memory, dict)
            and all(isinstance(name, str) for _, name in named)
            and unread(memory, named, _Kept, modules_of_the_user())
        )


@contextmanager
def unchanged(*keepers: Any) -> Iterator[None]:
    """After this context they keep what they kept before."""
    counts = Counts(keepers)
    try:
        yield
    finally:
        counts.put_back()


def alike(one: Any, other: Any) -> bool:
    """Compare two numbers, arrays or tensors, up to the order of a GPU's sums."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            return False
        near = _ROUNDED if one.is_cuda else 0.0
        with torch.no_grad():
            return torch.allclose(one, other, rtol=near, atol=0.0, equal_nan=True)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, _ITERATORS):
        return _reached(value)
    return copy.copy(value) if isinstance(value, (*_HELD, itertools.count, np.ndarray)) else value


def _restored(value: Any, as_it_was: Any) -> Any:
    """The object that was there, with what it had."""
    if isinstance(value, _HELD):
        value.clear()
        value.update(as_it_was) if isinstance(value, (dict, set)) else value.extend(as_it_was)
    elif isinstance(value, Tensor):
        if value.is_inference():
            return as_it_was
        if not alike(value, as_it_was):
            value.detach().copy_(as_it_was)
    elif isinstance(value, np.ndarray):
        if not alike(value, as_it_was):
            np.copyto(value, as_it_was)
    elif isinstance(value, itertools.count):
        return copy.copy(as_it_was)
    return value


def _counts(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= _SHORT and all(map(_is_number, value.values()))
    if isinstance(value, list):
        return len(value) <= _SHORT and all(map(_is_number, value))
    return _numeric(value) or isinstance(value, (itertools.count, *_ITERATORS, _Reached))


def _holds(value: Any) -> bool:
    return isinstance(value, _HELD) and len(value) <= _LONG


def _same(one: Any, kept: Any) -> bool:
    """Whether a number is what it was, and whether what is held are the same objects."""
    if isinstance(kept, _Reached):
        return isinstance(one, _ITERATORS) and _reached(one) == kept
    if type(one) is not type(kept):
        return False
    if not isinstance(kept, _HELD):
        return alike(one, kept) if _numeric(kept) else repr(one) == repr(kept)
    if len(one) != len(kept):
        return False
    if isinstance(kept, set):
        return bool(one == kept)
    if isinstance(kept, dict):
        return all(name in one and _is_still(one[name], value) for name, value in kept.items())
    return all(map(_is_still, one, kept))


def _is_still(one: Any, kept: Any) -> bool:
    return one is kept or (_is_number(one) and _is_number(kept) and alike(one, kept))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _numeric(value: Any) -> bool:
    """Whether it is a number, or a small array or tensor that no checkpoint has by itself."""
    if type(value) is Tensor:
        ordinary = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        return ordinary and value.numel() <= _LONG
    if type(value) is np.ndarray:
        return value.size <= _LONG and value.dtype.kind in "biufc"
    return _is_number(value)


def _reached(iterator: Any) -> _Reached:
    if isinstance(iterator, itertools.cycle):
        _, arguments, state = cast(tuple[Any, ...], iterator.__reduce__())
        return _Reached(operator.length_hint(arguments[0]), (len(state[0]),))
    frame = iterator.gi_frame
    if frame is None:
        return _Reached(-1, ())
    numbers = [each for each in frame.f_locals.items() if _is_number(each[1])]
    return _Reached(frame.f_lasti, tuple(sorted(numbers)))
