"""Changes by a callback to what training reads: one worker calls it, and others do not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from instep.engine.member import Member
from instep.engine.state.committed import CommittedState
from instep.usercode.numbers import alike, is_number
from instep.usercode.places import Place, places
from instep.worker.passes.late_trial import say_late


class CallbackWrites:
    """Looks at the numbers that the model and its losses name, around calls of callbacks.

    Args:
        member, state: the worker's.
        model: that is trained.
        keepers: its losses, and what weighs them.
    """

    def __init__(
        self, member: Member, state: CommittedState, model: nn.Module, keepers: Iterable[Any]
    ) -> None:
        self._member, self._state, self._model = member, state, model
        self._keepers = tuple(keepers)
        self._places: list[Place] | None = None

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
        before = [(place, place.get()) for place in self._places]
        numbers = [(place, value) for place, value in before if value is None or is_number(value)]
        attributes = [(vars(each), [*vars(each)]) for each in self._model.modules()]
        yield
        changed = [place.name for place, value in numbers if _another(place.get(), value)]
        changed += [
            name for now, known in attributes for name in now.keys() - known if is_number(now[name])
        ]
        if changed:
            why = f"{call} has changed {changed[0]!r}, which the model or its loss may read: "
            why += "callbacks are called on one worker, and others do not have the change"
            late = trial._replace(verdict=f"not shown: {why}")
            say_late(self._member, self._state, late, self._state.progress.step)


def _another(now: Any, value: Any) -> bool:
    return now is not value and (now is None or is_number(now)) and not alike(now, value)
