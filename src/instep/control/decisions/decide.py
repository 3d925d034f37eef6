"""The master's decisions: a pure function, without clock, socket or process.

`decide(state, event, now)` returns the next state and the actions to take. The shell in
`master.py` gets events from what it observes, and carries the actions out; so any run can be
written down as a list of events, and tested.

    gathering  ->  training  ->  releasing  ->  ended
        \\______________\\____________\\__>  ending  ->  ended

Several processes may share a replica (`State.fellows`). Where one of them is lost, the others are
killed, and all are started again: the *restart* of a replica.

When a group is formed is in `generations.py`, who is wanted in `membership.py`, what follows from
the loss of a process in `replacing.py` and `losses.py`, why a run stops in `stops.py`, how it
fails and ends in `endings.py`.
"""

from __future__ import annotations

from dataclasses import replace

from instep.comm.protocol.messages import Regroup, Release
from instep.control.decisions import (
    endings,
    generations,
    losses,
    membership,
    replacing,
    stops,
)
from instep.control.decisions.actions import Action, Kill, KillAll, Send
from instep.control.decisions.events import (
    Broke,
    Built,
    Ended,
    Event,
    Formed,
    HostJoined,
    HostLost,
    Hung,
    Interrupted,
    Joined,
    LastMessage,
    Noticed,
    Reconnected,
    Restarted,
    RolledBack,
    Scaled,
    Silent,
    StartFailed,
    Stuck,
    Tick,
    WentBack,
)
from instep.control.decisions.phases import IN_A_GROUP, KILLED, LIVING, Phase
from instep.control.decisions.state import Blame, State
from instep.control.stop_rules import Fired
from instep.units import readable_seconds

BROKEN_S = 0.3
"""How long the master waits, after a group came apart, to learn which process has ended."""

WAITING_S = 5.0
"""How long no process has come before it is said which wait for a fellow."""


def decide(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    """What follows from `event`, at `now` (seconds on any steady clock).

    Raises:
        TransitionError: the event cannot happen in this state; the state stays as it was.
    """
    if state.phase == "ended" or _is_from_killed(state, event):
        return state, []
    after, actions = _decide(state, event, now)
    after, releases = _release(after)
    return after, [*losses.restarts(state, after), *actions, *releases]


def _decide(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    match event:
        case HostJoined():
            return state, generations.starts(state)
        case Joined(worker):
            return replace(state.move(worker, Phase.BUILDING), came=now), []
        case Reconnected(worker, generation):
            return state, _reminders(state, worker, generation)
        case Built():
            return _built(state, event, now)
        case Formed(worker, generation):
            return _formed(state, worker, generation, now)
        case Broke():
            return _broke(state, event, now)
        case LastMessage(worker, message):
            return replacing.last_message(state, worker, message, now)
        case Ended():
            return replacing.ended(state, event, now)
        case StartFailed(worker, error):
            cause = f"its process could not be started: {error}. Make room, or use fewer workers."
            return endings.fail(state, Blame(worker, endings.failed("killed", cause, 0)), now)
        case Hung():
            return replacing.hung(state, event)
        case Silent():
            return replacing.silent(state, event, now)
        case Stuck():
            return _stuck(state, event, now)
        case Scaled():
            return membership.scaled(state, event, now)
        case Noticed(worker):
            return membership.noticed(state, worker, now)
        case HostLost(code, detail):
            return endings.host_lost(state, code, detail, now)
        case Interrupted():
            return stops.interrupted(state, event, now)
        case Fired():
            return stops.fired(state, event)
        case WentBack(checkpoint, step):
            back = replace(state, checkpoint=checkpoint, checkpoint_step=step, from_checkpoint=True)
            for worker in state.members:
                back = back.note(worker, owes=False)  # the checkpoint has what it had by then
            return generations.next_generation(back, now)
        case RolledBack(step):
            return stops.rolled_back(state, step), []
        case Restarted():
            return _restarted(state, now)
        case Tick(step):
            return _tick(state, step, now)


def _is_from_killed(state: State, event: Event) -> bool:
    """Whether an event is of a process that is being killed: only its end is waited for."""
    worker = getattr(event, "worker", -1)
    return state.member(worker).phase is Phase.KILLED and not isinstance(event, Ended)


def _built(state: State, event: Built, now: float) -> tuple[State, list[Action]]:
    if state.member(event.worker).phase in LIVING - {Phase.BUILDING}:
        return state, []  # sent again, as the master was lost, or released meanwhile
    state = state.move(event.worker, Phase.READY)
    if event.holds:
        state = state.note(event.worker, held=max(state.course, 1))
    recovers, together = state.recovers and event.recovers, state.together or event.together
    return generations.advance(replace(state, recovers=recovers, together=together), now)


def _formed(state: State, worker: int, generation: int, now: float) -> tuple[State, list[Action]]:
    if generation < state.course or generation <= state.member(worker).formed:
        return state, []  # from before the run went back, or sent again
    member = state.expect(worker, Phase.FORMING, Phase.INSIDE, Phase.LEFT, to="Formed")
    state = replace(state.note(worker, formed=generation), from_checkpoint=False)
    if generation != state.generation or member.phase is Phase.LEFT:
        return state, []
    state = state.move(worker, Phase.INSIDE)
    if state.complete:
        for each in state.draining:
            state = state.note(each, owes=False)  # it has handed over
    return generations.advance(state, now)  # the next change may be due


def _release(state: State) -> tuple[State, list[Action]]:
    """Members that are not needed may end: unwanted ones, once all of the group hold the state."""
    if state.phase == "releasing":
        unneeded = state.living
    elif state.phase == "training" and state.complete:
        unneeded = state.living - state.needed - set(state.group)
    else:
        return state, []
    unneeded -= state.those(frozenset({Phase.RELEASED, Phase.KILLED}))
    for worker in unneeded:
        state = state.move(worker, Phase.RELEASED)
    return state, [Send(worker, Release()) for worker in sorted(unneeded)]


def _broke(state: State, event: Broke, now: float) -> tuple[State, list[Action]]:
    if event.generation != state.generation:
        return state, []
    if state.expect(event.worker, *IN_A_GROUP, Phase.LEFT, to="Broke").phase in IN_A_GROUP:
        state = state.move(event.worker, Phase.LEFT)
    if event.holds:
        state = state.note(event.worker, held=event.generation)
    if event.cause and (state.seen is None or (event.mine and not state.seen.mine)):
        state = replace(state, seen=event)
    if state.phase == "gathering":
        return generations.advance(state, now)
    if state.phase != "training":
        return state, []
    if state.changing and state.left and generations.suffices(state, now):
        return generations.next_generation(state, now)
    if state.deadline is not None:
        return state, []
    # usually a process has ended, and its parent is about to report it
    wait_s = generations.MEETING_S if state.changing else BROKEN_S
    return replace(state, deadline=now + wait_s), []


def _stuck(state: State, event: Stuck, now: float) -> tuple[State, list[Action]]:
    if state.phase != "training" or event.generation != state.generation or not state.recovers:
        return state, []
    seconds = readable_seconds(event.seconds)
    why = f"the exchange made no progress for {seconds}, and every worker is alive"
    return generations.came_apart(state, event.step, why, now)


def _restarted(state: State, now: float) -> tuple[State, list[Action]]:
    """Do again what the lost master may not have done."""
    if state.phase in ("releasing", "ending"):
        kill: list[Action] = [KillAll()] if state.phase == "ending" else []
        return replace(state, deadline=now + endings.EXIT_S), kill
    hung = {n for n, member in state.members.items() if member.hung}
    kills = [Kill(worker) for worker in sorted(hung | state.those(KILLED))]
    again: list[Action] = [*generations.starts(state), *kills]
    actions: list[Action] = []
    if state.phase == "gathering":
        state, actions = generations.advance(state, now)
    elif not state.complete and state.recovers:
        why = "the master was lost while the group was forming"
        state, actions = generations.form_again(state, why, now)
    elif any(state.member(n).phase is Phase.LEFT for n in state.group):
        state = replace(state, deadline=now + generations.MEETING_S)
    return state, [*again, *actions]


def _reminders(state: State, worker: int, generation: int) -> list[Action]:
    """What a member may have missed while it had no connection."""
    member, sends = state.member(worker), list[Action]()
    if member.phase is Phase.ABSENT:
        return []
    training = state.phase == "training" and worker in state.group
    if training and generation < state.generation:
        sends.append(Send(worker, generations.form(state, worker)))
    if state.stop:
        sends.append(Send(worker, stops.stop(state)))
    if state.changing and worker in state.group:
        sends.append(Send(worker, Regroup(generation=state.generation)))
    if state.phase == "releasing" or member.phase is Phase.RELEASED:
        sends.append(Send(worker, Release()))
    return sends


def _tick(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    state, asked = stops.check_time(state, step, now)
    if asked:
        return state, asked
    if state.deadline is None and state.phase in ("gathering", "training"):
        state, actions = generations.advance(state, now)
        if now < max(state.since, state.came) + WAITING_S:
            return state, actions
        state, waits = generations.say_who_waits(state)
        return state, [*actions, *waits]
    if state.deadline is None or now < state.deadline:
        return state, []
    if state.phase in ("releasing", "ending"):
        ended, finish = endings.finish(state)
        return ended, [KillAll(), *finish]
    if state.suspect is not None:
        return endings.fail(state, state.suspect, now)
    return generations.came_apart(
        state, step, "the group came apart, and every process is alive", now
    )
