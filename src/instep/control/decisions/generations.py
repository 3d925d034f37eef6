"""The generations of a run: when the next group is formed, of whom, and what it is told.

A generation ends in one of two ways. It breaks: a member was lost, and the others wait
for the next one. Or it changes: those that shall join are ready, and all members leave
it at the same commit. A part of the decisions in `decide.py`, and as pure.
"""

from __future__ import annotations

from dataclasses import replace

from instep.comm.protocol.messages import Form, Regroup
from instep.control.decisions import crash_loop, endings, losses, stops
from instep.control.decisions.actions import Action, GoBack, Log, Send, Start
from instep.control.decisions.phases import IN_A_GROUP, KILLED, Phase
from instep.control.decisions.state import State

BUILDING_S, BOUND_S = 1.0, 15.0
"""How long the others wait for a replacement that gets ready, before they continue without it; and
for its process, where nobody else has the data of a lost one, or somebody is to leave."""

FIRST_MEETING_S, MEETING_S = 30.0, 2.0
"""How long the members of the first, and of a later generation may take to connect, at least."""

MEETING_EACH_S = 0.03
"""How much time each of many members adds."""

_NO_PROCESS = frozenset({Phase.ABSENT})
_GETTING_READY = frozenset({Phase.ABSENT, Phase.KILLED, Phase.BUILDING, Phase.READY})
"""Where the processes of a replica are until all of them can be in a group."""


def advance(state: State, now: float) -> tuple[State, list[Action]]:
    """Form the next generation, or ask for it, once all members that it shall have are ready."""
    # of one that is being killed it is not known what it still writes
    ended = any(state.member(n).phase in (Phase.ENDED, Phase.KILLED) for n in state.group)
    if ended or not suffices(state, now):
        return state, []
    if state.phase == "gathering":
        held = state.holders or state.those(IN_A_GROUP) or state.from_checkpoint
        return next_generation(state, now) if held or not state.course else (state, [GoBack()])
    inside = all(state.member(n).phase is Phase.INSIDE for n in state.group)
    if state.phase != "training" or set(state.group) == state.wanted or not inside:
        return state, []
    if state.changing or state.done:
        return state, []
    regroup = Regroup(generation=state.generation)
    sends: list[Action] = [Send(worker, regroup) for worker in state.group]
    return replace(state, changing=True, since=now), sends


def suffices(state: State, now: float) -> bool:
    """Whether those that are ready can be the next generation."""
    if state.needed <= state.ready:
        return True
    missing = state.wanted - state.whole(state.ready)
    if state.drains or missing & state.servers or not missing <= state.those(_GETTING_READY):
        return False
    if state.phase == "gathering":
        return _can_do_without(state, missing, now)
    return _can_let_go(state, missing, now)


def _can_do_without(state: State, missing: frozenset[int], now: float) -> bool:
    """Whether the others begin while a replacement is getting ready, and take it in later.

    Not where members own state: its replacement takes up what the lost one had. Where nobody else
    has its data, only while there is no process, as when its host is lost.
    """
    if state.bound and not missing <= state.those(_NO_PROCESS):
        return False
    waited_s = BOUND_S if state.bound else BUILDING_S
    return now >= state.since + waited_s and bool(state.holders - state.servers)


def _can_let_go(state: State, missing: frozenset[int], now: float) -> bool:
    """Whether a member that is to leave may, though others are missing: none has a process, as
    where no host has a place, and one that stays has the state."""
    waits = not missing <= state.those(_NO_PROCESS)
    if waits or not (state.changing or now >= state.since + BOUND_S):
        return False
    leaving = set(state.group) - state.wanted
    return bool(leaving) and bool(state.holders & state.wanted - state.servers)


def next_generation(state: State, now: float) -> tuple[State, list[Action]]:
    """Form a group of all members that it shall have and can have."""
    bound, holders = state.those(IN_A_GROUP), state.holders
    together = state.changing and state.left
    chosen = state.whole(state.needed & state.ready).union(*map(state.fellows, bound))
    if not together or not holders & chosen:
        chosen |= holders  # one may have committed what no other member has
    elif state.drains:
        chosen |= holders - set(state.draining)  # they have not handed over yet
    from_checkpoint = state.from_checkpoint and not bound
    after, generation = state, state.generation + 1
    for worker in chosen:
        after = after.move(worker, Phase.FORMING)
        if state.drains and worker in state.wanted:
            after = after.note(worker, owes=True)
    after = replace(
        after,
        phase="training",
        generation=generation,
        group=tuple(sorted(chosen - state.servers)) + tuple(sorted(chosen & state.servers)),
        draining=tuple(sorted(chosen - state.wanted)) if state.drains else (),
        begins_at=state.checkpoint if from_checkpoint else None,
        course=generation if from_checkpoint else state.course,
        timeout_s=_meeting_s(state, len(chosen)),
        changing=False,
        suspect=None,
        seen=None,
        deadline=None,
    )
    sends: list[Action] = [Send(worker, form(after, worker)) for worker in after.group]
    if state.stop:  # newcomers do not know it yet
        sends += stops.stops(after)
    fields = {"generation": generation, "members": list(after.group)}
    log = Log("generation_started", {**fields, "reason": state.why, "seconds": now - state.since})
    after, waits = say_who_waits(after)
    return after, [log, *waits, *sends]


def _meeting_s(state: State, members: int) -> float:
    """How long the members of the next generation may take to connect."""
    each_s = MEETING_EACH_S * members
    if not state.course:
        return max(FIRST_MEETING_S, each_s)
    return float(max(MEETING_S, each_s) * 2 ** min(state.broken, 6))


def say_who_waits(state: State) -> tuple[State, list[Action]]:
    """Say which processes wait, since some of their fellows are not there; of each set once."""
    if state.ranks == 1:
        return state, []
    there, waits, logs = state.living - state.those(KILLED), dict[int, list[int]](), list[Action]()
    for first in sorted(n for n in state.wanted if n % state.ranks == 0):
        fellows, replica = state.fellows(first), first // state.ranks
        if fellows & there and (missing := sorted(fellows - there)):
            waits[replica] = missing
            if missing != state.waits.get(replica):
                fields = {"workers": sorted(fellows & there), "missing": missing}
                logs.append(Log("replica_waits", {"replica": replica, **fields}))
    return replace(state, waits=waits), logs


def form(state: State, worker: int) -> Form:
    """The message that tells a member its group."""
    after = state.stop_after
    return Form(
        generation=state.generation,
        rank=state.group.index(worker),
        members=list(state.group),
        role=state.member(worker).role,
        servers=tuple(n for n in state.group if n in state.servers),
        draining=state.draining,
        timeout_s=state.timeout_s,
        checkpoint=state.begins_at,
        ends=state.begins_at is not None and after is not None and after < state.checkpoint_step,
        marks=crash_loop.marks(state),
    )


def came_apart(state: State, step: int, why: str, now: float) -> tuple[State, list[Action]]:
    """Form the group of the same members again, unless that has not helped before."""
    state, blame = crash_loop.judge_group(state, step, f"{why}.")
    return endings.fail(state, blame, now) if blame else form_again(state, why, now)


def form_again(state: State, why: str, now: float) -> tuple[State, list[Action]]:
    """Form the group of the same members again."""
    state, starts = losses.recall(replace(state, why=why, broken=state.broken + 1, deadline=None))
    state = replace(state, phase="gathering", since=now)
    return (state, starts) if starts else advance(state, now)


def starts(state: State) -> list[Action]:
    """Start the members that are needed and have no process."""
    if state.phase not in ("gathering", "training"):
        return []
    return [Start(worker) for worker in sorted(state.needed - state.joined)]
