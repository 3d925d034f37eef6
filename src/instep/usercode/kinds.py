"""Kinds of what the user's code keeps in Python: how each is noted, compared and put back.

What counts of it are numbers, of which there may be a few in a list, a dict, a tuple or an object;
how far an iterator has come; and whether a generator of random numbers has drawn.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.sharedctypes import Synchronized
from types import GeneratorType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from instep.usercode.numbers import (
    LONG,
    alike,
    is_large_tensor,
    is_number,
    is_small_array,
    is_small_tensor,
)
from instep.usercode.places import is_of_user, own_of

_SHORT = 1000
_BASES = OrderedDict, dict, list, set, deque
_COPIED: tuple[Any, ...] = type(iter([])), type(iter(())), type(iter(range(0))), itertools.count
"""Iterators that a copy can stand for."""
_ITERATORS = GeneratorType, itertools.cycle
"""That nobody can put back."""


class Kind(NamedTuple):
    """Operations on values of one kind."""

    of: Callable[[Any], bool]
    """Whether a value is of it."""
    note: Callable[[Any], Any]
    """Note what a value has now."""
    same: Callable[[Any, Any], bool]
    """Whether a value, of the same type, has what is noted, as far as it counts."""
    put_back: Callable[[Any, Any], Any]
    """Give a value what is noted; returns it, or what stands for it."""


def kind_of(value: Any) -> Kind:
    """Find the kind of a value; `OTHER` if nothing of it counts."""
    return next((kind for kind in _KINDS if kind.of(value)), OTHER)


def has_numbers(noted: Any) -> bool:
    """Look for a number in what was noted of a value, or it is as good as one."""
    if isinstance(noted, _Object):
        return bool(noted.numbers)
    return not isinstance(noted, tuple) or any(map(is_number, noted))


def copy_of(value: Any) -> Any:
    """Copy what is `numeric`."""
    return kind_of(value).note(value)


# ---- lists, sets and dicts


class Items(tuple[Any, ...]):
    """Items that a list, set, deque or dict held."""

    keys: tuple[Any, ...] = ()

    @classmethod
    def of(cls, held: Any) -> Items:
        if not issubclass(type(held), dict):
            return cls(held)
        items = cls(dict.values(held))
        items.keys = tuple(dict.keys(held))
        return items

    def same(self, held: Any, still: Callable[[Any, Any], bool]) -> bool:
        """Check that as many are held, each of which is still the one that was, as `still` says."""
        if len(held) != len(self):
            return False
        if issubclass(type(held), set):
            return all(item in held for item in self)
        if issubclass(type(held), dict):
            pairs = zip(self.keys, self, strict=True)
            return all(key in held and still(dict.get(held, key), value) for key, value in pairs)
        return all(map(still, held, self))

    def put_into(self, held: Any) -> None:
        """Let an object hold them, whatever else its own methods do."""
        base: Any = next(each for each in _BASES if issubclass(type(held), each))
        base.clear(held)
        if issubclass(base, dict):
            for key, value in zip(self.keys, self, strict=True):
                base.__setitem__(held, key, value)
        elif base is set:
            held.update(self)
        else:
            base.extend(held, self)


def holds(value: Any) -> bool:
    """Check for a list, a set, a deque or a dict, or what inherits from one."""
    return issubclass(type(value), _BASES)


def _held_counts(held: Any, items: Any) -> bool:
    if isinstance(held, set) or len(items) > _SHORT:
        return True
    return cast(Items, items).same(held, _still_counts)


def _tuple_counts(now: Any, kept: Any) -> bool:
    return len(now) == len(kept) and all(map(_still_counts, now, kept))


def _put_into(held: Any, items: Any) -> Any:
    if isinstance(items, Items) and not items.same(held, _is_still):
        items.put_into(held)
    return held


def _is_still(one: Any, kept: Any) -> bool:
    return one is kept or (is_number(one) and is_number(kept) and alike(one, kept))


def _still_counts(one: Any, kept: Any) -> bool:
    return not (is_number(one) and is_number(kept)) or alike(one, kept)


# ---- arrays and tensors


def _put_into_tensor(value: Tensor, kept: Tensor) -> Tensor:
    if alike(value, kept):
        return value
    if value.is_inference() or value.shape != kept.shape:
        return kept
    value.detach().copy_(kept)
    return value


def _put_into_array(value: Any, kept: Any) -> Any:
    if value.shape != kept.shape:
        return kept
    np.copyto(value, kept)
    return value


@dataclass(frozen=True)
class _Written:
    """A large tensor, and how often it was written to, as far as autograd knows."""

    tensor: Tensor
    times: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Written:
        return cls(tensor, tensor._version)

    def same(self, now: Tensor) -> bool:
        return now is not self.tensor or now._version == self.times


# ---- iterators and generators


def _reached(iterator: Any) -> tuple[Any, ...]:
    """Find how far a generator or a cycle has come."""
    if isinstance(iterator, itertools.cycle):
        _, arguments, state = cast(tuple[Any, ...], iterator.__reduce__())
        return operator.length_hint(arguments[0]), len(state[0])
    frame = iterator.gi_frame
    if frame is None:
        return (-1,)
    numbers = [each for each in frame.f_locals.items() if is_number(each[1])]
    return frame.f_lasti, *sorted(numbers)


def _put_iterator_back(iterator: Any, kept: Any) -> Any:
    return iterator if _place_of(iterator) == _place_of(kept) else copy.copy(kept)


def _place_of(iterator: Any) -> Any:
    of_count = type(iterator) is itertools.count
    return repr(iterator) if of_count else operator.length_hint(iterator)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return copy.deepcopy(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> Any:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
    return generator


# ---- objects


@dataclass(frozen=True)
class _Object:
    """An object of the user's, which another one may replace, and its numbers."""

    value: Any
    numbers: dict[Any, Any]

    @classmethod
    def of(cls, value: Any) -> _Object:
        return cls(value, {key: each for key, each in own_of(value).items() if is_number(each)})

    def same(self, now: Any) -> bool:
        """Check that it is there, or one with the same numbers: what it has is looked at itself."""
        if now is self.value:
            return True
        other = _Object.of(now).numbers
        return other.keys() == self.numbers.keys() and all(
            map(alike, other.values(), self.numbers.values())
        )


def _is_object(value: Any) -> bool:
    return is_of_user(type(value)) and not issubclass(type(value), nn.Module)


def _set_value(box: Any, value: Any) -> Any:
    box.value = value
    return box


def _empty_again(function: Any, calls: int) -> Any:
    if calls == 0 and function.cache_info().currsize:
        function.cache_clear()
    return function


def _as_it_is(value: Any, _noted: Any) -> Any:
    return value


def _is(*types: Any) -> Callable[[Any], bool]:
    return lambda value: issubclass(type(value), types)


OTHER = Kind(lambda value: True, lambda value: None, lambda now, noted: True, _as_it_is)

_KINDS = (
    Kind(is_number, lambda value: value, alike, lambda value, noted: noted),
    Kind(
        holds,
        lambda held: Items.of(held) if len(held) <= LONG else (),
        _held_counts,
        _put_into,
    ),
    Kind(
        _is(tuple),
        lambda value: value if len(value) <= _SHORT else (),
        _tuple_counts,
        lambda value, kept: value,
    ),
    Kind(is_small_tensor, lambda value: value.detach().clone(), alike, _put_into_tensor),
    Kind(is_large_tensor, _Written.of, lambda now, kept: kept.same(now), _as_it_is),
    Kind(is_small_array, copy.copy, alike, _put_into_array),
    Kind(
        _is(*_COPIED),
        copy.copy,
        lambda now, kept: _place_of(now) == _place_of(kept),
        _put_iterator_back,
    ),
    Kind(_is(*_ITERATORS), _reached, lambda now, kept: _reached(now) == kept, _as_it_is),
    Kind(
        _is(random.Random, torch.Generator, np.random.Generator, np.random.RandomState),
        _state_of,
        lambda now, kept: repr(_state_of(now)) == repr(kept),
        _set_state,
    ),
    Kind(
        _is(Synchronized, ctypes._SimpleCData),
        lambda box: box.value,
        lambda now, kept: alike(now.value, kept),
        _set_value,
    ),
    Kind(
        _is(type(lru_cache(lambda: None))),
        lambda function: function.cache_info().currsize,
        lambda now, kept: True,
        _empty_again,
    ),
    Kind(_is_object, _Object.of, lambda now, kept: kept.same(now), _as_it_is),
)
