"""Numbers in Python that a pass, or the reading of a sample, changes: what is counted on the way.

They may decide what happens only later, after a warm-up say, where no trial comes. A run calls a
loss once for each micro-batch, each reader has a dataset of its own, and no checkpoint has such
numbers. Seen are numbers, counters and cycles of `itertools`, how far a generator has come, small
arrays and tensors that are no buffers, and the numbers in short lists, dicts and tuples, at all
`places`.

What a place has is put back whatever it is, so that a flag and what it guards stay together. The
user's objects may be anything: what cannot be copied or compared is left alone.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import GeneratorType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from instep.usercode.places import Place, modules_of_the_user, places
from instep.usercode.unread import unread

_SHORT, _LONG = 1000, 10_000
_DICTS = dict, OrderedDict, defaultdict, Counter
_HELD = frozenset((list, set, deque, *_DICTS))
_ITERATORS = GeneratorType, itertools.cycle
"""That nobody can put back."""
_WHOLE = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
_REAL = torch.float16, torch.bfloat16, torch.float32, torch.float64
_ROUNDED = 1e-5
"""Relative: what the order of a GPU's sums may change."""
_MEMORIES = 8
"""So many are looked at for who reads them; each takes some hundredths of a second."""


class _HeldItems(tuple[Any, ...]):
    """Items that a list, set, deque or dict held."""

    keys: tuple[Any, ...] = ()

    @classmethod
    def of(cls, held: Any) -> _HeldItems:
        if not isinstance(held, dict):
            return cls(held)
        items = cls(held.values())
        items.keys = tuple(held)
        return items

    def same(self, held: Any, still: Callable[[Any, Any], bool]) -> bool:
        """Whether as many are held, each of which is still the one that was, as `still` says."""
        if len(held) != len(self):
            return False
        if isinstance(held, set):
            return all(item in held for item in self)
        if isinstance(held, dict):
            pairs = zip(self.keys, self, strict=True)
            return all(key in held and still(held[key], value) for key, value in pairs)
        return all(map(still, held, self))

    def put_into(self, held: Any) -> None:
        """Let an object hold them."""
        held.clear()
        if isinstance(held, dict):
            for key, value in zip(self.keys, self, strict=True):
                held[key] = value
        elif isinstance(held, set):
            held.update(self)
        else:
            held.extend(self)


class _Reached(NamedTuple):
    """How far a generator or a cycle has come."""

    place: int
    numbers: tuple[Any, ...]


class _Kept(NamedTuple):
    place: Place
    value: Any
    as_it_was: Any
    """A copy of the value, or itself if it cannot change, or cannot be copied."""

    @classmethod
    def of(cls, place: Place, value: Any) -> _Kept:
        try:
            return cls(place, value, _copied(value))
        except Exception:
            return cls(place, value, value)

    def grown(self) -> bool:
        """Whether what is held became more, or less."""
        now = self.place.get()
        return type(now) in _HELD and type(now) is type(self.value) and len(now) != len(self._items)

    @property
    def _items(self) -> _HeldItems:
        return cast(_HeldItems, self.as_it_was)

    def changed(self) -> bool:
        """Whether it is a number, or a few, and another now."""
        with suppress(Exception):
            return _counts(self.value, self.as_it_was) and not self._same(self.place.get())
        return False

    def put_back(self) -> None:
        """Restore the object that was there, and what it had."""
        with suppress(Exception):
            value = self._restored()
            if self.place.get() is not value:
                self.place.put(value)

    def _same(self, now: Any) -> bool:
        kept = self.as_it_was
        if isinstance(kept, _Reached):
            return isinstance(now, _ITERATORS) and _reached(now) == kept
        if type(now) is not type(self.value):
            return False
        if isinstance(kept, _HeldItems):
            return kept.same(now, _still_counts)
        if type(kept) is tuple:
            return len(now) == len(kept) and all(map(_still_counts, now, kept))
        return alike(now, kept) if _numeric(kept) else repr(now) == repr(kept)

    def _restored(self) -> Any:
        value, kept = self.value, self.as_it_was
        if isinstance(kept, _HeldItems):
            if not kept.same(value, _is_still):
                kept.put_into(value)
        elif isinstance(kept, Tensor) and kept is not value:
            if not alike(value, kept):
                if value.is_inference() or value.shape != kept.shape:
                    return kept
                value.detach().copy_(kept)
        elif isinstance(kept, np.ndarray) and kept is not value:
            if not alike(value, kept):
                if value.shape != kept.shape:
                    return kept
                np.copyto(value, kept)
        elif isinstance(kept, itertools.count) and repr(value) != repr(kept):
            return copy.copy(kept)
        return value


class Counts:
    """The numbers that some functions, modules and objects keep, as they are now.

    Whatever else is kept beside them is put back too. Of what lists and dicts hold beside numbers,
    and of sets and deques, only another length is a change: a memory that grows, and that something
    reads.

    Args:
        keepers: functions, modules, or anything else, of which nothing is looked at.
    """

    def __init__(self, keepers: Iterable[Any]) -> None:
        keepers = list(keepers)
        modules = [each for each in keepers if isinstance(each, nn.Module)]
        in_checkpoints = {id(each) for module in modules for each in module.buffers()}
        every = [(place, place.get()) for place in places(keepers)]
        self._kept = [
            _Kept.of(place, value)
            for place, value in every
            if value is not None and id(value) not in in_checkpoints
        ]
        self._unset = [place for place, value in every if value is None]
        self._attributes = [
            (f"{path}." if path else "", vars(each), [*vars(each)])
            for module in modules
            for path, each in module.named_modules()
        ]
        self._asked = 0

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
            if type(each.value) in _DICTS and each.grown():
                held, before = each.place.get(), each.as_it_was.keys
                found |= {f"{each.place.name}.{key}": held[key] for key in held.keys() - before}
        return {name: _copied(value) for name, value in found.items() if _numeric(value)}

    def put_back(self) -> None:
        """Restore what was kept at each place."""
        for each in self._kept:
            each.put_back()
        for place in self._unset:
            if place.get() is not None:
                with suppress(Exception):
                    place.put(None)
        for _, now, before in self._attributes:
            for key in now.keys() - before:
                del now[key]

    def _unread(self, memory: Any) -> bool:
        it = id(memory)  # a cell of this function would be one more that refers to it
        every = [each.place for each in self._kept if id(each.place.get()) == it]
        named = [(place.space, place.key or place.name) for place in every]
        self._asked += 1
        return (
            self._asked <= _MEMORIES
            and type(memory) in (list, set, deque)
            and all(isinstance(name, str) for _, name in named)
            and unread(memory, named, modules_of_the_user())
        )


@contextmanager
def unchanged(*keepers: Any) -> Iterator[Counts]:
    """After this context they keep what they kept before: the counts that are given."""
    counts = Counts(keepers)
    try:
        yield counts
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
    if type(value) in _HELD:
        return _HeldItems.of(value) if len(value) <= _LONG else value
    if isinstance(value, _ITERATORS):
        return _reached(value)
    if isinstance(value, Tensor) and _numeric(value):
        return value.detach().clone()
    small = type(value) is np.ndarray and _numeric(value)
    return copy.copy(value) if small or type(value) is itertools.count else value


def _counts(value: Any, kept: Any) -> bool:
    if isinstance(kept, _HeldItems):
        short = type(value) in (list, *_DICTS) and len(kept) <= _SHORT
        return short and any(map(_is_number, kept))
    if type(value) is tuple:
        return len(value) <= _SHORT and any(map(_is_number, value))
    return _numeric(value) or isinstance(kept, (itertools.count, _Reached))


def _is_still(one: Any, kept: Any) -> bool:
    return one is kept or (_is_number(one) and _is_number(kept) and alike(one, kept))


def _still_counts(one: Any, kept: Any) -> bool:
    return not (_is_number(one) and _is_number(kept)) or alike(one, kept)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _numeric(value: Any) -> bool:
    """Whether it is a number, or a small array or tensor that no checkpoint has by itself."""
    if type(value) is Tensor:
        return (
            value.dtype in (*_WHOLE, *_REAL)
            and value.layout is torch.strided
            and not (value.is_meta or value.is_nested)
            and value.numel() <= _LONG
            # its memory is its own, and there
            and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
        )
    if type(value) is np.ndarray:
        return value.size <= _LONG and value.dtype.kind in "biufc" and value.flags.writeable
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
