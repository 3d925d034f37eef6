"""Contents of lists, sets, dicts, tuples and objects of the user's: numbers, and other objects."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from instep.usercode.numbers import alike, is_number, is_small_tensor
from instep.usercode.places import is_of_user, own_of

MANY = 10_000
"""Items that are compared at most."""
_FEW = 100
"""Items that are compared at most in what stands where another object was."""
_BASES = OrderedDict, dict, list, set, deque


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


def held_counts(held: Any, items: Any) -> bool:
    """Compare the numbers that a list, set, deque or dict holds."""
    if len(items) > MANY:
        return True
    return cast(Items, items).same(held, _still_counts)


def tuple_counts(now: Any, kept: Any) -> bool:
    """Compare the numbers in tuples."""
    if len(now) != len(kept):
        return not has_numbers(kept)
    return all(map(_still_counts, now, kept))


def put_into(held: Any, items: Any) -> Any:
    """Let a list, set, deque or dict hold what it held; returns it."""
    if isinstance(items, Items) and not items.same(held, _is_still):
        items.put_into(held)
    return held


def _is_still(one: Any, kept: Any) -> bool:
    return one is kept or (is_number(one) and is_number(kept) and alike(one, kept))


def _still_counts(one: Any, kept: Any, deep: int = 3) -> bool:
    """Compare numbers, also those in what stands where another object was."""
    if one is kept:
        return True
    if is_number(one) and is_number(kept):
        return alike(one, kept)
    if type(one) is not type(kept) or not deep:
        return True
    if is_small_tensor(one) and is_small_tensor(kept):
        return alike(one, kept)
    if issubclass(type(one), (dict, list, tuple, deque)):
        mine, other = Items.of(one), Items.of(kept)
        if len(mine) != len(other) or mine.keys != other.keys or len(mine) > _FEW:
            return True
        return all(_still_counts(*pair, deep - 1) for pair in zip(mine, other, strict=True))
    if is_object(one):
        return OfObject.of(kept).same(one, deep - 1)
    return True


@dataclass(frozen=True)
class OfObject:
    """An object of the user's, which another one may replace, and its attributes."""

    value: Any
    own: dict[Any, Any]

    @classmethod
    def of(cls, value: Any) -> OfObject:
        return cls(value, {**own_of(value)})

    @property
    def numbers(self) -> list[Any]:
        """Those of its attributes that are some."""
        return [each for each in self.own.values() if is_number(each)]

    def same(self, now: Any, deep: int = 3) -> bool:
        """Check that it is there, or one with the same numbers: what it has is looked at itself."""
        if now is self.value:
            return True
        other = own_of(now)
        return all(
            _still_counts(other[key], kept, deep) for key, kept in self.own.items() if key in other
        )


def is_object(value: Any) -> bool:
    """Check for an object of the user's that is no module."""
    return is_of_user(type(value)) and not issubclass(type(value), nn.Module)


def has_numbers(noted: Any) -> bool:
    """Look for a number in what was noted of a value, or it is as good as one."""
    if isinstance(noted, OfObject):
        return bool(noted.numbers)
    return not isinstance(noted, tuple) or any(map(is_number, noted))
