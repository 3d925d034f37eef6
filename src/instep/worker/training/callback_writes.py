"""Changes by a callback to what training reads: one worker calls it, and others do not know."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.state.committed import CommittedState
from instep.engine.trial_result import Trial
from instep.engine.update import Update
from instep.recipe.forward import Forward
from instep.usercode.numbers import alike, is_number, is_small_array
from instep.usercode.places import KeptPlace, own_of, places
from instep.worker.passes.late_trial import say_late
from instep.worker.training.dataset_values import DatasetLook, DatasetValues
from instep.worker.training.steering import Name, named, steering

_TINY = 1000
"""Numbers in an array that are looked at: it is done at each call."""

_FEW = 64
"""Items of a dict or list that are looked at."""

_SCHEDULER = "; leave it to a scheduler of the recipe, such as ReduceLROnPlateau"


def writes_around(
    member: Member, engine: Engine, forward: Forward
) -> Callable[[str], AbstractContextManager[None]]:
    """Make the context of calls of callbacks that finds what they change of a recipe's training.

    Args:
        member, engine, forward: the worker's.
    """
    recipe = forward.recipe
    keepers = (*forward.losses, recipe.weight)
    data = (recipe.train, recipe.collate, recipe.augment)
    updates = [turn.update for turn in engine.turns]
    return CallbackWrites(member, engine.state, engine.model, keepers, data, updates).during


class CallbackWrites:
    """Looks around calls of callbacks at the numbers that the model, its losses and the dataset
    name; at tensors and arrays, but for those that checkpoints have; and at what optimizers and
    schedulers have. A dataset may be read meanwhile, in a thread or by the callback, which moves no
    number (the trial has seen that), but may load a table.

    Args:
        member, state: the worker's.
        model: that is trained.
        keepers: its losses, and what weighs them.
        data: what batches are made by.
        updates: of a step.
    """

    def __init__(
        self,
        member: Member,
        state: CommittedState,
        model: nn.Module,
        keepers: Iterable[Any],
        data: Iterable[Any] = (),
        updates: Iterable[Update] = (),
    ) -> None:
        self._member, self._state, self._model = member, state, model
        self._keepers, self._data, self._updates = tuple(keepers), tuple(data), tuple(updates)
        self._places: list[KeptPlace] | None = None
        self._of_data = DatasetValues(())

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Look at them before and after this context; the first change is the verdict's reason.

        Raises:
            SpecError: there is one, and `check.strict`.
        """
        trial = self._state.trial
        if trial is None or not trial.same:
            yield
            return
        if self._places is None:  # the first step may have made some
            self._places = list(places((self._model, *self._keepers)))
            self._of_data = DatasetValues(self._data)
        own = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}
        before = [_Before.of(place) for place in self._places]
        read = DatasetLook(self._of_data)
        owners = (*self._model.modules(), *self._keepers)
        attributes = [(own_of(each), [*own_of(each)]) for each in owners]
        steered = [steering(each) for each in self._updates]
        yield
        if found := _steered(self._updates, steered):
            self._say(trial, call, f"{found}, which training reads", _SCHEDULER)
            return
        changed = [
            each.place.name for each in before if id(each.value) not in own and each.changed()
        ]
        changed += [
            name for now, known in attributes for name in now.keys() - known if is_number(now[name])
        ]
        changed += read.changed()
        if changed:
            self._say(trial, call, f"{changed[0]!r}, which training may read")

    def _say(self, trial: Trial, call: str, changed: str, remedy: str = "") -> None:
        why = f"{call} has changed {changed}: "
        why += f"callbacks are called on one worker, and others do not have the change{remedy}"
        late = trial._replace(verdict=f"not shown: {why}")
        say_late(self._member, self._state, late, self._state.progress.step)


def _steered(updates: Iterable[Update], before: Iterable[dict[Name, Any]]) -> str:
    """Name the first number of an update that is another one now."""
    for update, was in zip(updates, before, strict=True):
        now = steering(update)
        for name in (*was, *now):
            if name not in was or name not in now or was[name] != now[name]:
                return named(name)
    return ""


_MODES = str, Enum, FunctionType, BuiltinFunctionType
"""Types of values that switch a loss or layer: `"huber"`, an activation."""


class _Before(NamedTuple):
    """Content of a place, as far as a change of it can be seen."""

    place: KeptPlace
    value: Any
    version: int
    copied: Any

    @classmethod
    def of(cls, place: KeptPlace) -> _Before:
        value = place.get()
        counted = isinstance(value, Tensor) and not value.is_inference()
        copied = copy.copy(value) if _is_tiny(value) or _is_short(value) else None
        return cls(place, value, value._version if counted else -1, copied)

    def changed(self) -> bool:
        """Check whether the place has another number, mode or tensor, or the same one changed."""
        now = self.place.get()
        if now is self.value:
            if isinstance(self.copied, (dict, list)):
                return _has_others(now, self.copied)
            if self.copied is not None:
                return not alike(now, self.copied)
            return self.version >= 0 and now._version != self.version
        if isinstance(self.value, _MODES) and isinstance(now, _MODES):
            return bool(now != self.value)
        was = self.value is None or _counts(self.value)
        return was and (now is None or _counts(now)) and not alike(now, self.value)


def _counts(value: Any) -> bool:
    return is_number(value) or is_small_array(value) or isinstance(value, Tensor)


def _is_short(value: Any) -> bool:
    return type(value) in (dict, list) and len(value) <= _FEW


def _has_others(now: Any, before: Any) -> bool:
    """Whether a dict or list has other numbers or modes; a longer list is a history."""
    if isinstance(now, dict):
        if any(is_number(now[key]) for key in now.keys() - before.keys()):
            return True
        pairs = [(now[key], before[key]) for key in now.keys() & before.keys()]
    else:
        pairs = list(zip(now, before, strict=True)) if len(now) == len(before) else []
    kinds = *_MODES, int, float, complex
    return any(
        isinstance(one, kinds) and isinstance(other, kinds) and not alike(one, other)
        for one, other in pairs
    )


def _is_tiny(value: Any) -> bool:
    return is_small_array(value) and value.size <= _TINY
