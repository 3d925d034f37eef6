"""What is gone with a process that was lost, and which others have to start again with it.

Processes that share a replica live and die together, and on GPUs all of a group do. A part of the
decisions in `decide.py`, and as pure: who is to blame is in `crash_loop.py`, and when the next
generation begins in `generations.py`.
"""

from __future__ import annotations

from dataclasses import replace

from instep.control.decisions.actions import Action, Forget, Kill, Start
from instep.control.decisions.phases import IN_A_GROUP, KILLED, LIVING, Phase
from instep.control.decisions.state import State


def lose(state: State, worker: int) -> State:
    """Forget a process; if it was in a group, it may have begun what others must not repeat.

    Without it its fellows are of no use: they are killed, and the replica starts again. A
    process that never joined has met none of them.
    """
    lost = frozenset({worker})
    if state.member(worker).phase is not Phase.ABSENT:
        fellows = frozenset(state.members) if state.together else state.fellows(worker)
        lost |= fellows & state.those(LIVING - KILLED - {Phase.RELEASED})
        again = {n // state.ranks: state.restarts_of(n) + 1 for n in lost}
        state = replace(state, restarts=state.restarts | again)
    in_a_group = bool(lost & state.those(IN_A_GROUP))
    state = state.move(worker, Phase.ABSENT)
    for fellow in lost - {worker}:
        state = state.move(fellow, Phase.KILLED).note(fellow, last_message=None)
    if state.suspect is not None and state.suspect.worker in lost - {worker}:
        apart = any(state.member(n).phase is Phase.LEFT for n in state.group)
        state = replace(state, suspect=None, deadline=state.deadline if apart else None)
    return replace(state, from_checkpoint=state.from_checkpoint and not in_a_group)


def restarts(before: State, after: State) -> list[Action]:
    """Where a replica starts again, its processes are killed, and their keys are of no use."""
    killed = after.those(KILLED) - before.those(KILLED)
    kills: list[Action] = [Kill(worker) for worker in sorted(killed)]
    if after.ranks == 1:
        return kills
    again = (r for r, times in after.restarts.items() if times != before.restarts.get(r, 0))
    return [*kills, *map(Forget, again)]


def recall(state: State) -> tuple[State, list[Action]]:
    """Members that had finished must finish again; those that have ended start again."""
    starts: list[Action] = []
    for worker in sorted(state.done):
        if state.member(worker).phase is Phase.ENDED:
            state = lose(state, worker)
            starts += [Start(worker)] if worker in state.wanted else []
        else:
            state = state.note(worker, last_message=None)
    return state, starts
