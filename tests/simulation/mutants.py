"""Faults put into the control plane on purpose: a simulation that cannot fail proves nothing.

Each is one that somebody could make, or has made: the last part of the list is
of faults that these stories found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from instep.comm.connection import MasterConnection
from instep.comm.messages import Broken, Done, Formed
from instep.control import decide as mind
from instep.control.state import GoBack, Kill, State
from instep.control.stop_rules import Rules
from instep.control.watch import Watch
from instep.worker.catch_up import Beginning

from . import workers
from .truth import Truth

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def _state(**fields: Callable[[State, State], Any]) -> Change:
    """A decision after which these fields are what a function of before and after says."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def mutant(state: State, *arguments: Any) -> Any:
            result = real(state, *arguments)
            after, *rest = result if isinstance(result, tuple) else (result,)
            made = {name: make(state, after) for name, make in fields.items()}
            after = replace(after, **made)
            return (after, *rest) if rest else after

        return mutant

    return change


def _given(**fields: Callable[[State], Any]) -> Change:
    """A decision that takes these fields for something else."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, *rest: real(
            replace(state, **{name: make(state) for name, make in fields.items()}), *rest
        )

    return change


def _without(kind: type) -> Change:
    """A decision that leaves one kind of action out."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def mutant(*arguments: Any) -> Any:
            state, actions = real(*arguments)
            return state, [each for each in actions if not isinstance(each, kind)]

        return mutant

    return change


def _nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: None


def _hears_nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, *arguments: (state, [])


def _lowest_rank_gives(real: Callable[..., Beginning]) -> Callable[..., Beginning]:
    return lambda places: real(places)._replace(step=max(places[0].step, 0), root=0)


def _any_generation(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, worker: int, word: Any, now: float) -> Any:
        if isinstance(word, Done):
            word = Done(generation=state.generation, step=word.step, rule=word.rule)
        return real(state, worker, word, now)

    return mutant


def _forgets(kind: type) -> Change:
    """A connection that does not say this again to the next master."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def mutant(connection: MasterConnection, error: Any) -> Any:
            kept = [each for each in connection._unacknowledged if not isinstance(each, kind)]
            connection._unacknowledged.clear()
            connection._unacknowledged.extend(kept)
            return real(connection, error)

        return mutant

    return change


def _restarted_as_if_told(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, now: float) -> Any:
        if state.phase == "gathering":
            return state, mind._starts(state)
        return real(state, now)

    return mutant


MUTANTS: dict[str, tuple[Any, str, Change]] = {
    "who holds the state is not noted": (
        mind,
        "_formed",
        _state(from_origin=lambda before, after: True, holders=lambda before, after: frozenset()),
    ),
    "a lost worker stays built": (
        mind,
        "_without",
        _state(built=lambda before, after: before.built),
    ),
    "a lost worker stays a holder": (
        mind,
        "_without",
        _state(holders=lambda before, after: before.holders),
    ),
    "a group is formed before all are built": (
        mind,
        "_advance",
        _given(built=lambda state: state.joined | state.built),
    ),
    "a last word from an earlier generation counts": (mind, "_said", _any_generation),
    "nobody goes back": (mind, "_advance", _without(GoBack)),
    "a group that broke is not formed again": (mind, "_broke", _hears_nothing),
    "who hangs is left alone": (mind, "_hung", _without(Kill)),
    "a worker that calls again is told nothing": (mind, "_reminders", lambda real: lambda *_: []),
    "who leaves is never released": (mind, "_let_go", lambda real: lambda state: (state, [])),
    "the lowest rank gives its state": (workers, "beginning", _lowest_rank_gives),
    "the ledger is not mended": (Truth, "mend", _nothing),
    "who has formed does not say so again": (MasterConnection, "_find_another", _forgets(Formed)),
    "who has left does not say so again": (MasterConnection, "_find_another", _forgets(Broken)),
    # found by these stories
    "who may have committed is not asked": (
        mind,
        "_next_generation",
        _given(bound=lambda state: frozenset()),
    ),
    "who leaves goes before the others hold the state": (
        mind,
        "_next_generation",
        _state(holders=lambda before, after: after.holders - after.leaving),
    ),
    "a lost worker cannot have committed anything": (
        mind,
        "_without",
        _state(from_origin=lambda before, after: before.from_origin),
    ),
    "a new master waits for what is there already": (mind, "_restarted", _restarted_as_if_told),
    "a new master forgets who was to be ended": (mind, "_restarted", _without(Kill)),
    "a new master takes what was recorded for judged": (
        Rules,
        "replay",
        lambda real: lambda rules, figures: [None for _ in real(rules, figures)],
    ),
    "a silent worker is waited for until it speaks": (
        Watch,
        "_is_silent",
        lambda real: lambda watch, *how: watch.step_s is not None and real(watch, *how),
    ),
}
"""Module or class, the name in it, and what is made of what it names."""


@contextmanager
def mutated(name: str) -> Generator[None, None, None]:
    """With one of them in place."""
    where, attribute, change = MUTANTS[name]
    with mock.patch.object(where, attribute, change(getattr(where, attribute))):
        yield
