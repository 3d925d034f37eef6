"""Numbers, tensors, arrays, lists and transforms that a dataset has, and whether they changed.

Datasets are large, so of arrays a bounded number of bytes is compared, and of lists some items.
Torch counts what it writes to a tensor. Who changes them is not known here. Way in: `DatasetLook`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from instep.data.reading.noticed import is_simple, objects_of
from instep.data.reading.own_writes import attributes, set_by_reading
from instep.usercode.numbers import alike, is_large_tensor, is_number
from instep.usercode.places import KeptPlace, own_of, places

_PLACES, _ITEMS, _FEW = 1000, 1024, 64
"""Places of functions that are looked at, items of a list that are compared, and of one whose items
are looked at each."""

_BLOCK, _BLOCKS, _ALL = 1 << 12, 64, 1 << 20
"""Bytes of a block, blocks of an array, and bytes of all arrays that are compared at most."""


class DatasetValue(NamedTuple):
    """A place where a dataset, or what it is made of, has something."""

    place: KeptPlace
    lazy: bool = False
    """Whether reading a sample sets it too."""
    grows: bool = True
    """Whether reading a sample may add to it."""


class DatasetValues:
    """Places where datasets, and functions beside them, have something: attributes, closures and
    globals.

    Args:
        data: the datasets and functions.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        data = list(data)
        self._objects = list({id(each): each for of in data for each in objects_of(of)}.values())
        self._reading, found = set_by_reading(self._objects), dict[tuple[int, Any], DatasetValue]()
        for each in self._objects:
            kind, own = type(each), own_of(each)
            for key, value in attributes(each).items():
                place = KeptPlace(own if key in own else each, key, f"{kind.__name__}.{key}")
                grows = key not in self._reading[kind].looked_at
                for one in (place, *_items(place, value)):
                    found[id(one.holder), one.key] = DatasetValue(
                        one, self._is_lazy(each, key), grows
                    )
        for place in islice(places(data), _PLACES):
            if type(place.holder) is dict and place.key == "":
                continue  # all attributes of an object
            found.setdefault((id(place.holder), place.key), DatasetValue(place))
        self.every = list(found.values())

    def _is_lazy(self, each: Any, key: str) -> bool:
        return key in self._reading[type(each)].set

    def names(self) -> list[tuple[Any, set[str]]]:
        """Return the objects, each with the names of its attributes."""
        return [(each, set(own_of(each))) for each in self._objects]

    def added(self, before: list[tuple[Any, set[str]]]) -> Iterator[str]:
        """Yield the names of numbers, tensors and arrays that objects have got since `names`."""
        for each, known in before:
            for key, value in own_of(each).items():
                if key not in known and _is_setting(value) and not self._is_lazy(each, key):
                    yield key


def _items(place: KeptPlace, value: Any) -> Iterator[KeptPlace]:
    """Tensors and arrays in a short list, tuple or dict."""
    if isinstance(value, (list, tuple, dict)) and len(value) <= _FEW:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (Tensor, np.ndarray)):
                holder = {key: item} if isinstance(value, tuple) else value
                yield KeptPlace(holder, key, f"{place.name}[{key!r}]")


class DatasetLook:
    """Values that datasets have now.

    Args:
        values: where to look.
    """

    def __init__(self, values: DatasetValues) -> None:
        self._values, self._names = values, values.names()
        self._left, self._seen = _ALL, list[tuple[DatasetValue, Any, Any]]()
        known = dict[int, Any]()
        for each in values.every:
            value = each.place.get()
            if id(value) not in known:
                known[id(value)] = self._content(value)
            self._seen.append((each, value, known[id(value)]))

    def changed(self) -> Iterator[str]:
        """Yield the names of those that have something else now."""
        self._left, now = _ALL, dict[int, Any]()
        for _, value, _ in self._seen:  # in the same order, as the bytes are counted
            if id(value) not in now:
                now[id(value)] = self._content(value)
        for each, value, content in self._seen:
            present = each.place.get()
            if present is value:
                changed = _differs(each, content, now[id(value)])
            elif value is None:
                changed = _is_setting(present) and not each.lazy
            else:
                counts = _is_setting(value) and (present is None or _is_setting(present))
                changed = counts and not (each.lazy and not is_number(value))
                changed = changed and not _alike(present, value)
            if changed:
                yield each.place.name
        yield from self._values.added(self._names)

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return (-1 if value.is_inference() else value._version), self._bytes(_array_of(value))
        if isinstance(value, np.ndarray):
            return self._bytes(value)
        if type(value) is list:
            return _Listed(len(value), tuple(map(_simple, value[:: 1 + len(value) // _ITEMS])))
        if type(value) is dict:
            return _Listed(len(value), tuple(map(_simple, islice(value.items(), _ITEMS))))
        return None

    def _bytes(self, value: np.ndarray[Any, Any] | None) -> bytes:
        """Copy some of its numbers; none where other processes may write to them."""
        if value is None or value.dtype.hasobject or not value.flags.writeable or _is_lent(value):
            return b""
        most = min(_BLOCK * _BLOCKS, self._left)
        if value.nbytes <= most:
            self._left -= value.nbytes
            return value.tobytes()
        if not value.flags.c_contiguous or most < _BLOCK:
            return b""
        self._left -= most
        flat = value.reshape(-1).view(np.uint8)
        starts = np.linspace(0, flat.size - _BLOCK, most // _BLOCK, dtype=np.int64).tolist()
        return b"".join(flat[start : start + _BLOCK].tobytes() for start in starts)


def _alike(one: Any, other: Any) -> bool:
    try:
        return alike(one, other)
    except (RuntimeError, TypeError):  # of a sparse one, say
        return False


def _simple(item: Any) -> Any:
    if not is_simple(item):
        return None
    return tuple(item) if isinstance(item, list) else item


class _Listed(NamedTuple):
    length: int
    items: tuple[Any, ...]


def _differs(each: DatasetValue, before: Any, now: Any) -> bool:
    if isinstance(before, _Listed) and isinstance(now, _Listed) and before.length != now.length:
        return not each.grows
    return bool(before != now)


def _is_setting(value: Any) -> bool:
    """Whether it may say what samples are: numbers, a mode, a transform."""
    return is_number(value) or isinstance(value, (Tensor, np.ndarray, str)) or callable(value)


def _array_of(value: Tensor) -> np.ndarray[Any, Any] | None:
    if not is_large_tensor(value) or value.device.type != "cpu" or value.is_shared():
        return None
    try:
        return value.detach().numpy()
    except (TypeError, RuntimeError):  # a type that numpy has not
        return None


def _is_lent(value: np.ndarray[Any, Any]) -> bool:
    """Whether its memory is another object's: a mapped file, or what processes share."""
    base: Any = value
    while isinstance(base, np.ndarray):
        if base.base is None:
            return not base.flags.owndata
        base = base.base
    return not isinstance(base, Tensor) or base.is_shared()
