"""A member ends, hangs or fails: another takes its place, or the run fails with it.

A part of the decisions in `decide.py`, and as pure; what is lost with a process is in
`losses.py`, how a run fails and ends in `endings.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from instep.comm.protocol.messages import Done, Failed
from instep.control.decisions import crash_loop, endings, generations, losses
from instep.control.decisions.actions import Action, Kill, Log, Start
from instep.control.decisions.events import (
    Ended,
    Hung,
    Silent,
)
from instep.control.decisions.phases import IN_A_GROUP, KILLED, LIVING, Phase
from instep.control.decisions.state import Blame, State
from instep.data.samples.last_read import is_reading
from instep.errors import PeerError


def ended(state: State, event: Ended, now: float) -> tuple[State, list[Action]]:
    """A member's process has ended."""
    worker, code, member = event.worker, event.code, state.member(event.worker)
    if member.phase is Phase.KILLED and state.phase in ("gathering", "training"):
        return _ended_with_fellow(state, worker, now)
    if worker in state.done and state.phase == "training":
        return state.move(worker, Phase.ENDED), []  # it had finished
    replaced = member.phase is Phase.ABSENT or (state.recovers and member.last_message is None)
    reads = is_reading(event.place) and not event.place.ahead
    by_a_read = reads and member.last_message is None  # native code may call exit()
    if code == PeerError.exit_code and replaced and not by_a_read:
        event, code = replace(event, code=None), None  # it lost its master, or was refused
    unexplained = code is None or code < 0 or by_a_read
    if state.phase in ("gathering", "training") and state.recovers:
        in_the_group = state.phase == "training" and worker in state.group
        if worker not in state.needed and not in_the_group:
            return generations.advance(losses.lose(state, worker), now)
        if unexplained:
            return _replace(state, event, now)
    state = state.move(worker, Phase.ENDED)
    if state.phase in ("releasing", "ending"):
        return (state, []) if state.living else endings.finish(state)
    blame = Blame(worker, endings.of(code, event.step, event.place if unexplained else None))
    if unexplained:  # a signal is a cause in itself
        return endings.fail(state, blame, now)
    return endings.suspect(state, blame, now)


def _replace(state: State, event: Ended, now: float) -> tuple[State, list[Action]]:
    """A member was lost: start another in its place, unless that has not helped before."""
    worker = event.worker
    state, failure, ends = crash_loop.judge(state, event)
    if ends:
        return endings.fail(state.move(worker, Phase.ENDED), Blame(worker, failure), now)
    before, state = state, losses.lose(state, worker)
    fields: dict[str, Any] = {"worker": worker, "step": failure.step, "cause": failure.cause}
    if killed := state.those(KILLED) - before.those(KILLED):
        fields["restarted"] = sorted(killed)
    log = Log("worker_lost", fields)
    if state.phase == "training" and worker not in state.group and not state.changing:
        return state, [log, Start(worker)]  # the others train on
    waiting = state.phase == "gathering" or not state.course
    state = replace(
        state,
        phase="gathering",
        since=state.since if waiting else now,
        why=f"{state.member(worker).role} {worker} was lost: {failure.cause}",
        changing=False,
        broken=0,
        apart=None,
        deadline=state.deadline if state.suspect else None,
    )
    state, starts = losses.recall(state)
    if worker in state.needed:
        starts = [Start(worker), *starts]
    state, actions = (state, []) if starts else generations.advance(state, now)
    return state, [log, *starts, *actions]


def _ended_with_fellow(state: State, worker: int, now: float) -> tuple[State, list[Action]]:
    """A process has ended that was killed because of a fellow, which is the cause."""
    state = state.move(worker, Phase.ABSENT)
    if worker in state.needed:
        return state, [Start(worker)]
    return generations.advance(state, now)


def hung(state: State, event: Hung) -> tuple[State, list[Action]]:
    """A member hangs: kill it, once."""
    member = state.member(event.worker)
    if member.phase not in LIVING or member.hung or not state.recovers:
        return state, []
    if state.phase not in ("gathering", "training"):
        return state, []
    at = f" ({event.where})" if event.where else ""
    during = f" at step {event.step}" if event.step else ""
    how = f"it {event.how} in {event.phase}{during}{at}."
    fields = {"worker": event.worker, "step": event.step, "phase": event.phase, "how": event.how}
    log = Log("worker_hung", {**fields, "where": event.where})
    return state.note(event.worker, hung=how, loops=event.loops), [log, Kill(event.worker)]


def silent(state: State, event: Silent, now: float) -> tuple[State, list[Action]]:
    """A member that cannot be replaced is silent: the run fails."""
    going_on = state.phase in ("gathering", "training")
    if event.worker not in state.living or state.recovers or not going_on:
        return state, []
    failure = endings.failed("silent", event.cause, event.step, event.phase)
    return endings.fail(state, Blame(event.worker, failure), now)


def last_message(
    state: State, worker: int, message: Done | Failed, now: float
) -> tuple[State, list[Action]]:
    """A member has finished, or failed."""
    if isinstance(message, Failed):
        may_follow = message.kind == PeerError.__name__  # from another worker's failure
        if may_follow and state.member(worker).phase is Phase.RELEASED:
            return state, []  # or from the end of a fellow, which was released too
        state, blame = state.note(worker, last_message=message), Blame(worker, message)
        return (endings.suspect if may_follow else endings.fail)(state, blame, now)
    if message.generation != state.generation or state.member(worker).phase is Phase.RELEASED:
        return state, []  # it has to finish again with the others, or sends it again
    state.expect(worker, *IN_A_GROUP, Phase.ENDED, to="Done")
    state = state.note(worker, last_message=message)
    if state.phase != "training" or not state.done.keys() >= set(state.group):
        return state, []
    return replace(state, phase="releasing", deadline=now + endings.EXIT_S), []
