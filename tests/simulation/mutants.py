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

from msgspec import structs

from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.messages import Broken, Done, Formed, Welcome
from instep.control.decisions import decide as decisions
from instep.control.decisions import generations, losses, membership, replacing
from instep.control.decisions.actions import GoBack, Kill
from instep.control.decisions.phases import IN_A_GROUP, Member, Phase
from instep.control.decisions.state import State
from instep.control.keys import Keys
from instep.control.stop_rules import Rules
from instep.control.watch import Watch
from instep.data.dealing import deal
from instep.engine.assignment import NOTHING_FINISHED, Lockstep
from instep.engine.state.catch_up import Beginning

from . import roles, workers
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


def _ignored(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, *arguments: (state, [])


def _stays(phase: Phase) -> Change:
    """A lost member of a group whose record goes to a phase in which it may be in the next one."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def mutant(state: State, worker: int) -> State:
            before = state.member(worker)
            after = real(state, worker)
            if before.phase not in IN_A_GROUP:
                return after
            kept = replace(before, phase=phase)
            return replace(after, members=after.members | {worker: kept})

        return mutant

    return change


def _with_members(change: Callable[[State, int, Member], Member]) -> Callable[[State], Any]:
    """Records of which each was changed."""
    return lambda state: {n: change(state, n, each) for n, each in state.members.items()}


def _not_in_a_group(state: State, number: int, member: Member) -> Member:
    return replace(member, phase=Phase.LEFT) if member.phase in IN_A_GROUP else member


def _holds_only_if_wanted(state: State, number: int, member: Member) -> Member:
    return member if member.wanted else replace(member, formed=0)


def _any_has_drained(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, now: real(replace(state, drains=state.drains and not state.draining), now)


def _form_without(name: str) -> Change:
    """A message in which one field has its default."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: structs.replace(real(*arguments), **{name: ()})

    return change


def _as_plain(state: State) -> State:
    """A state in which each process is a replica of its own."""
    return replace(state, ranks=1)


def _fellows_go_on(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, worker: int) -> State:
        after, fellows = real(state, worker), state.fellows(worker) - {worker}
        kept = {n: state.members[n] for n in fellows if n in state.members}
        return replace(after, members=after.members | kept)

    return mutant


def _alone(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, worker: int, now: float) -> Any:
        after, actions = real(_as_plain(state), worker, now)
        return replace(after, ranks=state.ranks), actions

    return mutant


def _server_dropped(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, event: Any, now: float) -> Any:
        if event.worker in state.servers:
            state = state.note(event.worker, wanted=False)
        return real(state, event, now)

    return mutant


def _lowest_rank_gives(real: Callable[..., Beginning]) -> Callable[..., Beginning]:
    return lambda places: real(places)._replace(number=max(places[0].number, 0), root=0)


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
            messages = connection.unacknowledged.messages
            kept = [each for each in messages if not isinstance(each, kind)]
            messages.clear()
            messages.extend(kept)
            return real(connection, error)

        return mutant

    return change


def _asks_once(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(connection: MasterConnection, channel: Any) -> Any:
        question, connection.unacknowledged.question = connection.unacknowledged.question, None
        introduced = real(connection, channel)
        connection.unacknowledged.question = question
        return introduced

    return mutant


def _dealt_once_more(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(assignment: Lockstep, parts: int, speeds: Any) -> list[list[int]]:
        units = real(assignment, parts, speeds)
        every = deal(parts, len(assignment._working), speeds)
        for rank, dealt in zip(assignment._working, every, strict=True):
            units[rank] = sorted({*units[rank], *dealt})
        return units

    return mutant


def _left_out(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(assignment: Lockstep, parts: int, speeds: Any) -> list[list[int]]:
        return [[n for n in units if n < parts - 1] for units in real(assignment, parts, speeds)]

    return mutant


def _owes_nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, worker: int) -> State:
        after = real(state, worker)
        return after if state.member(worker).wanted else after.note(worker, owes=False)

    return mutant


def _restarted_as_if_told(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(state: State, now: float) -> Any:
        if state.phase == "gathering":
            return state, generations.starts(state)
        return real(state, now)

    return mutant


MUTANTS: dict[str, tuple[Any, str, Change]] = {
    "no record says who holds the state": (
        decisions,
        "_formed",
        lambda real: lambda state, *rest: real(replace(state, course=99), *rest),
    ),
    "a lost worker stays ready": (losses, "lose", _stays(Phase.READY)),
    "a lost worker stays a holder": (losses, "lose", _stays(Phase.LEFT)),
    "a group is formed before all are built": (
        State,
        "ready",
        lambda real: property(lambda state: state.living),
    ),
    "the last word of an earlier generation counts": (replacing, "last_message", _any_generation),
    "the run never goes back": (generations, "advance", _without(GoBack)),
    "a group that broke is not formed again": (decisions, "_broke", _ignored),
    "a worker that hangs is not killed": (replacing, "hung", _without(Kill)),
    "a worker that reconnects is told nothing": (
        decisions,
        "_reminders",
        lambda real: lambda *_: [],
    ),
    "a worker that leaves is never released": (
        decisions,
        "_release",
        lambda real: lambda state: (state, []),
    ),
    "a worker that leaves is released as soon as it is not wanted": (
        State,
        "complete",
        lambda real: property(lambda state: True),
    ),
    "the lowest rank gives its state": (workers, "beginning", _lowest_rank_gives),
    "the ledger is not mended": (Truth, "mend", _nothing),
    "Formed is not sent again": (MasterConnection, "_connect_to_next", _forgets(Formed)),
    "Broken is not sent again": (MasterConnection, "_connect_to_next", _forgets(Broken)),
    # found by these stories
    "a member that may have committed is not asked": (
        generations,
        "next_generation",
        _given(members=_with_members(_not_in_a_group)),
    ),
    "a worker that leaves goes before the others hold the state": (
        generations,
        "next_generation",
        _given(members=_with_members(_holds_only_if_wanted)),
    ),
    "a lost worker cannot have committed anything": (
        losses,
        "lose",
        _state(from_checkpoint=lambda before, after: before.from_checkpoint),
    ),
    "a new master waits for members that are ready": (
        decisions,
        "_restarted",
        _restarted_as_if_told,
    ),
    "a new master does not kill again": (decisions, "_restarted", _without(Kill)),
    "a new master skips the figures that were recorded": (
        Rules,
        "replay",
        lambda real: lambda rules, figures: [None for _ in real(rules, figures)],
    ),
    "a silent worker is waited for until it speaks": (
        Watch,
        "_is_silent",
        lambda real: lambda watch, *how: watch.step_s is not None and real(watch, *how),
    ),
    # against the phases of a member
    "a worker that has left its group is inside again": (
        decisions,
        "_broke",
        lambda real: lambda state, event, now: (state.move(event.worker, Phase.INSIDE), []),
    ),
    "a member is told to form before it is built": (
        State,
        "ready",
        lambda real: property(lambda state: state.joined),
    ),
    # against draining
    "a worker that leaves does not drain": (
        generations,
        "next_generation",
        _given(drains=lambda state: False),
    ),
    "a draining worker gets work": (generations, "form", _form_without("draining")),
    "a group that broke has drained": (
        generations,
        "next_generation",
        _any_has_drained,
    ),
    "a worker that is lost while it leaves owes nothing": (losses, "lose", _owes_nothing),
    "what is handed over in doubt never counts": (
        workers,
        "beginning",
        lambda real: lambda places: real([place._replace(start_in_doubt=-1) for place in places]),
    ),
    # against rounds
    "what members have finished of a round is computed again": (
        workers,
        "finished",
        lambda real: lambda step, held: NOTHING_FINISHED,
    ),
    "finished parts of a round are dealt out once more": (
        Lockstep,
        "_around_finished",
        _dealt_once_more,
    ),
    "a part of a round that nobody has finished is left out": (
        Lockstep,
        "_around_finished",
        _left_out,
    ),
    "the work of a step is dealt among those that leave as well": (
        Lockstep,
        "__init__",
        lambda real: (
            lambda self, form, *rest, **named: real(
                self, structs.replace(form, draining=()), *rest, **named
            )
        ),
    ),
    # against processes that another program has started
    "a member is told its group twice": (
        decisions,
        "_reminders",
        lambda real: lambda state, worker, generation: real(state, worker, 0),
    ),
    "a key that was asked of a lost master is not asked of the next": (
        MasterConnection,
        "_introduce",
        _asks_once,
    ),
    # against replicas of several processes
    "a fellow of a lost process is not killed": (
        losses,
        "restarts",
        lambda real: lambda *states: [each for each in real(*states) if not isinstance(each, Kill)],
    ),
    "the fellows of a lost process go on": (losses, "lose", _fellows_go_on),
    "a group may have a part of a replica": (
        State,
        "whole",
        lambda real: lambda state, numbers: numbers,
    ),
    "a part of a replica holds the state": (
        State,
        "holders",
        lambda real: property(lambda state: real.fget(_as_plain(state))),
    ),
    "restarts are counted for each process": (
        State,
        "restarts_of",
        lambda real: lambda state, number: real(_as_plain(state), number),
    ),
    "what was told in an earlier start of a replica is found in the next": (
        Welcome,
        "restarts",
        lambda real: property(lambda welcome: 0),
    ),
    "what the processes of a replica told each other is forgotten with a generation": (
        Keys,
        "forget",
        lambda real: lambda keys, prefix: real(keys, ""),
    ),
    "a new master knows nothing that the processes of a replica told each other": (
        roles._Journal,
        "keep",
        _nothing,
    ),
    "a worker that leaves goes without its fellows": (membership, "noticed", _alone),
    # against servers
    "a lost server is not replaced": (replacing, "_replace", _server_dropped),
    "a server is a worker": (generations, "form", _form_without("servers")),
}
"""Module or class, the name in it, and what is made of what it names."""


@contextmanager
def mutated(name: str) -> Generator[None, None, None]:
    """With one of them in place."""
    where, attribute, change = MUTANTS[name]
    with mock.patch.object(where, attribute, change(getattr(where, attribute))):
        yield
