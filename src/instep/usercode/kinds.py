"""Kinds of what the user's code keeps in Python: how each is noted, compared and put back.

What counts of it are numbers, of which there may be a few in a list, a dict, a tuple or an object;
how far an iterator has come; whether a generator of random numbers has drawn; what an estimator of
a library has learnt; and what a small table or sparse matrix has.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import pickle
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.usercode.digests import digest_of
from instep.usercode.held import (
    MANY,
    Items,
    OfObject,
    held_counts,
    holds,
    is_object,
    put_into,
    tuple_counts,
)
from instep.usercode.iterators import is_stepwise, reached
from instep.usercode.numbers import (
    LONG,
    alike,
    is_large_array,
    is_large_tensor,
    is_number,
    is_small_array,
    is_small_tensor,
    sum_of_bytes,
)
from instep.usercode.places import is_of_user, own_of

_COPIED: tuple[Any, ...] = type(iter([])), type(iter(())), type(iter(range(0))), itertools.count
"""Iterators that a copy can stand for."""

_TABLES = frozenset(("pandas", "polars", "scipy"))
"""Packages of tables and sparse matrices."""

_ELEMENTS = 1_000_000
"""Of a table that is looked at, at most: a memory, not a data set."""


class KeptKind(NamedTuple):
    """Operations on values of one kind."""

    of: Callable[[Any], bool]
    """Whether a value is of it."""
    note: Callable[[Any], Any]
    """Note what a value has now."""
    same: Callable[[Any, Any], bool]
    """Whether a value, of the same type, has what is noted, as far as it counts."""
    put_back: Callable[[Any, Any], Any]
    """Give a value what is noted; returns it, or what stands for it."""


def kind_of(value: Any) -> KeptKind:
    """Find the kind of a value; `OTHER` if nothing of it counts."""
    return next((kind for kind in _KINDS if kind.of(value)), OTHER)


def copy_of(value: Any) -> Any:
    """Copy what is `numeric`."""
    return kind_of(value).note(value)


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


def _put_iterator_back(iterator: Any, kept: Any) -> Any:
    return iterator if reached(iterator) == reached(kept) else copy.copy(kept)


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


def _set_value(box: Any, value: Any) -> Any:
    box.value = value
    return box


def _set_variable(variable: ContextVar[Any], value: Any) -> Any:
    if value is not None:
        variable.set(value)
    return variable


def _empty_again(function: Any, calls: int) -> Any:
    if calls == 0 and function.cache_info().currsize:
        function.cache_clear()
    return function


@dataclass(frozen=True)
class _Fitted:
    """Attributes that an estimator of a library had, and their digest."""

    own: dict[Any, Any]
    digest: str

    @classmethod
    def of(cls, value: Any) -> _Fitted:
        return cls(copy.deepcopy(own_of(value)), digest_of(value, {}))

    def put_into(self, value: Any) -> Any:
        if digest_of(value, {}) != self.digest:
            own = own_of(value)
            own.clear()
            own.update(copy.deepcopy(self.own))
        return value


@dataclass(frozen=True)
class _Table:
    """A copy of a library's table or sparse matrix, and a digest of what it has."""

    copied: Any
    digest: bytes

    @classmethod
    def of(cls, value: Any) -> _Table:
        return cls(copy.deepcopy(value), cls.digest_of(value))

    @staticmethod
    def digest_of(value: Any) -> bytes:
        if hasattr(value, "tocoo"):  # a sparse matrix, which has noted whether its rows are sorted
            flat = value.tocoo()
            value = flat.shape, flat.row.tobytes(), flat.col.tobytes(), flat.data.tobytes()
        return blake2b(pickle.dumps(value)).digest()

    def put_into(self, value: Any) -> Any:
        if self.digest_of(value) == self.digest:
            return value
        own, anew = own_of(value), copy.deepcopy(self.copied)
        if not own:
            return anew
        own.clear()
        own.update(own_of(anew))
        return value


def _is_table(value: Any) -> bool:
    """Check that it is a small table or sparse matrix of a library."""
    kinds = type(value).__mro__[:-1]
    of = {str(kind.__module__).partition(".")[0] for kind in kinds}
    if of.isdisjoint(_TABLES) or type(shape := getattr(value, "shape", None)) is not tuple:
        return False
    return int(value.nnz if hasattr(value, "tocoo") else math.prod(shape)) <= _ELEMENTS


def _is_estimator(value: Any) -> bool:
    """Whether it learns as those of scikit-learn do, and is no class of the user's."""
    kind = type(value)
    named = hasattr(kind, "fit") and hasattr(kind, "get_params")
    return named and bool(own_of(value)) and not is_of_user(kind)


def _as_it_is(value: Any, _noted: Any) -> Any:
    return value


def _is(*types: Any) -> Callable[[Any], bool]:
    return lambda value: issubclass(type(value), types)


OTHER = KeptKind(lambda value: True, lambda value: None, lambda now, noted: True, _as_it_is)

_KINDS = (
    KeptKind(is_number, lambda value: value, alike, lambda value, noted: noted),
    KeptKind(
        holds,
        lambda held: Items.of(held) if len(held) <= LONG else (),
        held_counts,
        put_into,
    ),
    KeptKind(
        _is(tuple),
        lambda value: value if len(value) <= MANY else (),
        tuple_counts,
        lambda value, kept: value,
    ),
    KeptKind(is_small_tensor, lambda value: value.detach().clone(), alike, _put_into_tensor),
    KeptKind(is_large_tensor, _Written.of, lambda now, kept: kept.same(now), _as_it_is),
    KeptKind(is_small_array, copy.copy, alike, _put_into_array),
    KeptKind(is_large_array, sum_of_bytes, lambda now, kept: sum_of_bytes(now) == kept, _as_it_is),
    KeptKind(
        _is(*_COPIED),
        copy.copy,
        lambda now, kept: reached(now) == reached(kept),
        _put_iterator_back,
    ),
    KeptKind(is_stepwise, reached, lambda now, kept: reached(now) == kept, _as_it_is),
    KeptKind(
        _is(random.Random, torch.Generator, np.random.Generator, np.random.RandomState),
        _state_of,
        lambda now, kept: repr(_state_of(now)) == repr(kept),
        _set_state,
    ),
    KeptKind(
        _is(Synchronized, ctypes._SimpleCData),
        lambda box: box.value,
        lambda now, kept: alike(now.value, kept),
        _set_value,
    ),
    KeptKind(
        _is(ContextVar),
        lambda variable: variable.get(None),
        lambda now, kept: alike(now.get(None), kept),
        _set_variable,
    ),
    KeptKind(
        _is(type(lru_cache(lambda: None))),
        lambda function: function.cache_info().currsize,
        lambda now, kept: True,
        _empty_again,
    ),
    KeptKind(
        _is_table,
        _Table.of,
        lambda now, kept: kept.digest_of(now) == kept.digest,
        lambda value, kept: kept.put_into(value),
    ),
    KeptKind(
        _is_estimator,
        _Fitted.of,
        lambda now, kept: digest_of(now, {}) == kept.digest,
        lambda value, kept: kept.put_into(value),
    ),
    KeptKind(is_object, OfObject.of, lambda now, kept: kept.same(now), _as_it_is),
)
