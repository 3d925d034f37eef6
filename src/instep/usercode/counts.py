"""Numbers in Python that a pass, or the reading of a sample, changes: what is counted on the way.

They may decide what happens only later, after a warm-up say, where no trial comes. A run calls a
loss once for each micro-batch, each reader has a dataset of its own, and no checkpoint has such
numbers. Seen is what one of the `kinds` counts, at all `places`.

What a place has is put back whatever it is, so that a flag and what it guards stay together. The
user's objects may be anything: what cannot be copied or compared is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch import nn

from instep.usercode.held import Items, has_numbers
from instep.usercode.kinds import OTHER, KeptKind, copy_of, kind_of
from instep.usercode.numbers import numbers_in, numeric, sample_of
from instep.usercode.places import CACHE, KeptPlace, modules_of_the_user, places, returned
from instep.usercode.unread import unread

_MEMORIES = 8
"""So many are looked at for who reads them; each takes some hundredths of a second."""


class _Kept(NamedTuple):
    place: KeptPlace
    value: Any
    kind: KeptKind
    noted: Any

    @classmethod
    def of(cls, place: KeptPlace, value: Any) -> _Kept:
        try:
            kind = kind_of(value)
            return cls(place, value, kind, kind.note(value))
        except Exception:
            return cls(place, value, OTHER, None)

    def grown(self) -> bool:
        """Whether what is held became more, or less."""
        now = self.place.get()
        noted = isinstance(self.noted, Items) and type(now) is type(self.value)
        return noted and len(now) != len(self.noted)

    def changed(self) -> bool:
        """Check whether what counts of it is another now."""
        with suppress(Exception):
            if self.kind is not OTHER:
                now = self.place.get()
                if type(now) is type(self.value):
                    return not self.kind.same(now, self.noted)
                return has_numbers(self.noted)
        return False

    def put_back(self) -> None:
        """Restore the object that was there, and what it had."""
        with suppress(Exception):
            value = self.kind.put_back(self.value, self.noted)
            if self.place.get() is not value:
                self.place.put(value)


class Counts:
    """The numbers that some functions, modules and objects keep, as they are now.

    Whatever else is kept beside them is put back too. Of what lists and dicts hold beside numbers,
    and of sets and deques, only another length is a change: a memory that grows, and that something
    reads.

    Args:
        keepers: functions, modules, objects. The first module is the one that checkpoints have the
            parameters and buffers of.
        but: objects that are not looked at.
    """

    def __init__(self, keepers: Iterable[Any], but: Iterable[Any] = ()) -> None:
        keepers = list(keepers)
        modules = [each for each in keepers if isinstance(each, nn.Module)]
        in_checkpoints = {
            id(each) for module in modules[:1] for each in (*module.parameters(), *module.buffers())
        }
        every = [(place, place.get()) for place in places(keepers, but)]
        self._kept = [
            _Kept.of(place, value)
            for place, value in every
            if value is not None and id(value) not in in_checkpoints
        ]
        self._unset = [(place, place.there) for place, value in every if value is None]
        modules += [value for _, value in every if issubclass(type(value), nn.Module)]
        attributes = {
            id(each): (f"{path}." if path else "", vars(each), [*vars(each)])
            for module in reversed(modules)
            for path, each in module.named_modules()
        }
        self._attributes = list(attributes.values())
        self._asked = 0

    def changed(self, *, memories: bool = True, among: Container[str] | None = None) -> str:
        """Name the first number that is another by now, or memory; empty if none is.

        Args:
            memories: whether to look at the lengths of lists, sets and dicts too.
            among: the names that count; all if None.
        """
        for each in self._kept:
            if among is not None and each.place.name not in among:
                continue
            changed = memories if each.grown() else each.changed()
            if changed and not self._unread(each.place.get()):
                return each.place.name
        return ""

    def grown(self) -> str:
        """Name the first memory that has more, or less, by now; empty if none has."""
        return next((each.place.name for each in self._kept if each.grown()), "")

    def first_set(self) -> dict[str, Any]:
        """Copy what is set now and was not: numbers, arrays and tensors, by name; also those in a
        list, tuple or dict, in a module, and what a cached function has returned.
        """
        found = {place.name: place.get() for place, _ in self._unset}
        for path, now, before in self._attributes:
            found |= {f"{path}{key}": now[key] for key in now.keys() - before}
        for each in self._kept:
            if issubclass(type(each.value), dict) and each.grown():
                held, before = each.place.get(), each.noted.keys
                found |= {f"{each.place.name}.{key}": held[key] for key in held.keys() - before}
            elif issubclass(type(each.value), list) and each.grown():
                held, many = each.place.get(), len(each.noted)
                found[f"{each.place.name}[{many}:{len(held)}]"] = held[many:]
            elif type(each.value) is CACHE and each.noted == 0:
                found[f"{each.place.name}()"] = [*returned(each.value)]
        return {
            name: copy_of(number) if numeric(number) else sample_of(number)
            for path, value in found.items()
            for name, number in numbers_in(path, value)
        }

    def left(self) -> set[str]:
        """Name the attributes and variables that are other than they were, or hold other numbers.

        Those in lists, dicts and tuples are called by what holds them.
        """
        found = {
            each.place.key or each.place.name
            for each in self._kept
            if not each.place.is_item
            and (each.place.get() is not each.value or each.grown() or each.changed())
        }
        found |= {place.key or place.name for place, _ in self._unset if place.get() is not None}
        found |= {key for _, now, before in self._attributes for key in now.keys() - before}
        return {name for name in found if type(name) is str}

    def put_back(self) -> None:
        """Restore what was kept at each place."""
        for each in self._kept:
            each.put_back()
        for place, there in self._unset:
            if place.get() is not None:
                with suppress(Exception):
                    place.put(None) if there else place.drop()
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
            and not any(place.is_item for place in every)
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
