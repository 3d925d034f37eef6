"""What a dataset is told while a run goes on: the epoch, and what the user's loop sets on it.

Loader processes have the dataset as it was when they were forked. A loop that calls
`dataset.set_epoch(epoch)`, or sets `dataset.difficulty = 2`, speaks to the object of its own
process. `Told` notices that before a slice is handed out, and the processes are told the same: a
call is made again, and numbers and strings are set. What cannot be sent (a new transform) is
refused by name. What reading itself sets is each process's own (`own_writes.py`); a loop that sets
the same is refused. So what a loop says holds from the next batch on, wherever samples are read.

Sets, dicts, long lists and arrays of which reading looks up items are also noticed when the loop
changes them in place, up to `_BYTES`; larger ones are not.

A recipe has no loop: its dataset is told each epoch before a sample of it is read, as Accelerate
does (`tell`). So is the object of the process that trains, before the step that begins an epoch,
wherever samples are read: a loss, a model or a scheduler may look at it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakSet

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from instep.data.order import key
from instep.data.reading.generators import preserved, seed_all
from instep.data.reading.noticed import is_setting, is_shared, is_simple, objects_of, same, snapshot
from instep.data.reading.own_writes import Writes, codes_of_reading, set_by_reading
from instep.errors import DataError
from instep.usercode.places import operands

_OF_EPOCH = 29
"""Number of what a key is drawn for, beside those of `fetch.py`: a call of `set_epoch`."""

SET_EPOCH = "set_epoch()"
"""Stands for the method among the names of attributes."""

Change = tuple[int, str, Any]
"""The number of an object, an attribute, and its value."""

_LISTENING: WeakSet[Told] = WeakSet()
_SETTING_EPOCH: list[None] = []
"""One for each call of a `set_epoch` that is under way: it is made in other processes too."""
_TELLING: list[None] = []
"""One while the call is `Told.tell`'s, so that a dataset that hands it on is no loop that calls."""


class Told:
    """A dataset's objects, and what the user's code has said to them since this was made.

    Made before loader processes are forked, so that an object has one number in all of them.
    """

    def __init__(self, dataset: Any, *, tells: bool = False, seed: int = 0) -> None:
        self._dataset, self._seed = dataset, seed
        self._length = len(dataset) if tells else None
        self._objects = list(objects_of(dataset))
        self._datasets = list(_with_set_epoch(dataset))
        self.tells = tells
        """Whether `tell` is to be called for each slice."""
        self.elsewhere = False
        """Whether other processes read, and are to be told what is set here."""
        self._epoch: int | None = None  # that the datasets here have been told last
        self._said: dict[tuple[int, str], Any] = {}
        self._known: dict[tuple[int, str], Any] = {}  # of `_said`, at the last `look`
        self._applied: dict[tuple[int, str], Any] = {}
        self._seen = [snapshot(each) for each in self._objects]
        self._numbers = {id(each): number for number, each in enumerate(self._objects)}
        self._set_by_loop = set[tuple[int, str]]()  # since the last scan
        self._set_here = set[tuple[int, str]]()  # by reading, in this process
        self._shared_changed = False
        _LISTENING.add(self)
        for each in self._objects:
            _listen(type(each))
            _listen_to_writes(type(each))

    @property
    def _sharing(self) -> list[Told]:
        """The other readers of this process with a dataset of this one."""
        others = [told for told in list(_LISTENING) if told is not self]
        return [told for told in others if self._has_of(told) or told._has_of(self)]

    def _has_of(self, other: Told) -> bool:
        return any(id(each) in self._numbers for each in other._datasets)

    @cached_property
    def _by_reading(self) -> dict[type, Writes]:
        return set_by_reading(self._objects)

    @cached_property
    def _codes_of_reading(self) -> frozenset[CodeType]:
        return codes_of_reading(self._objects)

    @cached_property
    def _sets_values_of_others(self) -> bool:
        """Whether reading may change a value that processes share, as a count does."""
        return any("value" in operands(code, "STORE_ATTR") for code in self._codes_of_reading)

    @property
    def changes(self) -> list[Change]:
        """All that was said so far, for another process that reads the dataset."""
        return [(number, name, value) for (number, name), value in self._said.items()]

    def look(self) -> bool:
        """Whether something was said since the last call; the user's thread calls it.

        Raises:
            DataError: what was set cannot be sent to another process.
        """
        self._shared_changed = False
        self._scan()
        before, self._known = self._known, dict(self._said)
        return self._shared_changed or before != self._known

    def wrote(self, target: Any, name: str, frame: FrameType) -> None:
        """Some code sets an attribute of an object."""
        number = self._numbers.get(id(target))
        if number is None or _SETTING_EPOCH:
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code in self._codes_of_reading:
                self._set_here.add((number, name))
                return
            above = above.f_back
        self._set_by_loop.add((number, name))

    def _scan(self) -> None:
        by_loop, self._set_by_loop = self._set_by_loop, set()
        for number, name in sorted(by_loop):
            reading = self._by_reading[type(self._objects[number])].set
            if name in reading or (number, name) in self._set_here:
                raise self._set_by_both(number, name)
        for number, each in enumerate(self._objects):
            now, seen = snapshot(each), self._seen[number]
            for name, token in now.items():
                before = seen.get(name)
                changed = before is None or not same(before, token)
                if changed and not self._is_readings(number, name, before, token):
                    self._note(number, name, before, token)
            self._seen[number] = now

    def _is_readings(self, number: int, name: str, before: Any, token: Any) -> bool:
        """Whether reading has changed an attribute, and not the user's loop."""
        by_reading = self._by_reading[type(self._objects[number])]
        if name in by_reading.set or (number, name) in self._set_here:
            return True
        in_place = before is not None and before[0] is token[0]
        noticed = type(token[0]) in (dict, set, list, np.ndarray) and not is_simple(token[0])
        return in_place and noticed and name not in by_reading.looked_at

    def _note(self, number: int, name: str, before: Any, token: Any) -> None:
        value = token[0]
        if is_shared(value) and before is not None and before[0] is value:
            # other processes see it; what they have read before it is read again
            self._shared_changed |= not self._sets_values_of_others
        elif is_simple(value):
            self._said[number, name] = value
        elif before is None or before[0] is None:
            if is_setting(value):
                raise self._cannot_send(number, name)
        else:
            raise self._cannot_send(number, name)

    def _set_by_both(self, number: int, name: str) -> DataError:
        return DataError(
            f"{name!r} of {type(self._objects[number]).__name__} was set while the run reads from "
            "it, and reading a sample sets it too: each loader process has its own. Set another "
            "attribute, which reading only looks at; or set data.loaders = 0."
        )

    def _cannot_send(self, number: int, name: str) -> DataError:
        each = self._objects[number]
        value = type(getattr(each, name)).__name__
        return DataError(
            f"{name!r} of {type(each).__name__} was set while the run reads from it: loader "
            f"processes have it as it was when they were started, and {value} cannot be sent to "
            "them. Numbers, strings and lists of them can, and set_epoch(epoch) is called there "
            "too: let the rest follow from these; or set data.loaders = 0."
        )

    def heard(self, call: Callable[[], Any], target: Any, epoch: Any) -> Any:
        """The user's code calls `set_epoch` of an object."""
        numbers = [n for n, each in enumerate(self._objects) if each is target]
        if not numbers:
            return call()
        self._scan()
        with _setting_epoch():
            result = call()
        self._seen = [snapshot(each) for each in self._objects]
        for number, name in self._said:  # the call may have set them again
            if name != SET_EPOCH:
                self._said[number, name] = getattr(self._objects[number], name, None)
        self._said.pop((numbers[0], SET_EPOCH), None)
        self._said = {(numbers[0], SET_EPOCH): epoch, **self._said}
        return result

    def apply(self, changes: list[Change]) -> None:
        """In a loader process: have the dataset be as it is in the process that trains."""
        said = {(number, name): value for number, name, value in changes}
        if said == self._applied:
            return
        for (number, name), value in said.items():
            if name != SET_EPOCH:
                setattr(self._objects[number], name, value)
            elif (number, name) not in self._applied or self._applied[number, name] != value:
                self._objects[number].set_epoch(value)
        self._applied = said

    @property
    def is_told(self) -> bool:
        """Whether `tell` has somebody to speak to."""
        return any(told.tells and told._datasets for told in (self, *self._sharing))

    def tell_again(self, epoch: int) -> None:
        """Speak as `tell` does, whatever was said last."""
        self._epoch = None
        self.tell(epoch)

    def tell(self, epoch: int) -> None:
        """Before a slice of this epoch is read; what the user's code has said goes first.

        What it draws meanwhile from the global generators follows from the job's seed and the
        epoch.

        Raises:
            DataError: the dataset has another length now.
        """
        if epoch == self._epoch or any(name == SET_EPOCH for _, name in self._said):
            return
        every = [self, *self._sharing]
        if not any(told.tells for told in every):
            return
        for told in every:
            if told.elsewhere:
                told._scan()
            told._epoch = None
        self._epoch = epoch
        with preserved():
            seed_all(key(self._seed, epoch, _OF_EPOCH))
            for each in self._datasets:
                _quietly(each, epoch)
        for told in every:
            told._seen = [snapshot(each) for each in told._objects]
        if self._length is not None and (now := len(self._dataset)) != self._length:
            raise DataError(
                f"set_epoch({epoch}) changes the length of the dataset, from {self._length:,} to "
                f"{now:,} samples: a run has as many in each epoch. Let len() stay, and a sample "
                "follow from its index and the epoch; or train the stages as runs, each from the "
                "model of the one before (start.model)."
            )


def _quietly(target: Any, epoch: int) -> None:
    """Call `set_epoch` as no user's code does."""
    method = target.set_epoch
    unheard = getattr(getattr(method, "__func__", None), "__wrapped__", None)
    _TELLING.append(None)
    try:
        with _setting_epoch():
            unheard(method.__self__, epoch) if unheard else method(epoch)
    finally:
        _TELLING.pop()


@contextmanager
def _setting_epoch() -> Iterator[None]:
    _SETTING_EPOCH.append(None)
    try:
        yield
    finally:
        _SETTING_EPOCH.pop()


def _listen(kind: type) -> None:
    """Have calls of a class's `set_epoch` be heard; a class that cannot be changed is left."""
    method = getattr(kind, "set_epoch", None)
    if not isinstance(method, FunctionType) or hasattr(method, "_heard"):
        return
    owner = next(each for each in kind.__mro__ if "set_epoch" in vars(each))

    @functools.wraps(method)
    def set_epoch(self: Any, *args: Any, **named: Any) -> Any:
        call = functools.partial(method, self, *args, **named)
        given = [*args, *named.values()]
        for told in list(_LISTENING) if len(given) == 1 and not _TELLING else ():
            call = functools.partial(told.heard, call, self, given[0])
        return call()

    set_epoch._heard = True  # type: ignore[attr-defined]
    owner.set_epoch = set_epoch  # type: ignore[attr-defined]


def _listen_to_writes(kind: type) -> None:
    """Have a class's attributes be set as before, and those be told who listen."""
    plain: Callable[[Any, str, Any], None] = kind.__setattr__  # type: ignore[assignment]
    root = kind.__module__.partition(".")[0]
    if hasattr(plain, "_heard") or root == "torch" or root in sys.stdlib_module_names:
        return

    def __setattr__(self: Any, name: str, value: Any) -> None:
        plain(self, name, value)
        _wrote(self, name)

    __setattr__._heard = True  # type: ignore[attr-defined]
    with suppress(TypeError):  # a class that cannot be changed
        kind.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]


def _wrote(target: Any, name: str) -> None:
    """An attribute was set; by the user's loop, if not in a thread or by a method of reading."""
    if threading.current_thread() is threading.main_thread():
        for told in list(_LISTENING):
            told.wrote(target, name, sys._getframe(2))


def _with_set_epoch(dataset: Any) -> Iterator[Any]:
    """The outermost datasets that have a `set_epoch`."""
    if callable(getattr(dataset, "set_epoch", None)):  # one that hands it on has it too
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _with_set_epoch(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for each in dataset.datasets:
            yield from _with_set_epoch(each)
