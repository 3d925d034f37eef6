"""Why and when a run is to stop: a user asks, a rule of `[stop]` fires, or the time is over.

A part of the decisions in `decide.py`, and as pure. How a run ends then is in `endings.py`.
"""

from __future__ import annotations

from dataclasses import replace

from instep.comm.protocol.messages import Stop
from instep.control.decisions import endings
from instep.control.decisions.actions import Action, Log, Send
from instep.control.decisions.events import Interrupted
from instep.control.decisions.state import State
from instep.control.stop_rules import Fired
from instep.units import readable_seconds
from instep.words import AGAIN, asked_by


def interrupted(state: State, event: Interrupted, now: float) -> tuple[State, list[Action]]:
    """A user wants the run to stop: at the next commit, and the second time now."""
    state = replace(state, asked=state.asked + 1)
    if state.phase in ("ending", "releasing"):
        return state, []
    came = AGAIN if state.asked > 1 else "came"
    why = f"{asked_by(event.by)} {came}"
    fields = {"rule": "interrupted", "step": event.step, "why": why}
    log = Log("stop_requested", {"by": event.by, **fields})
    forms = state.phase == "training" and not state.lost and not state.holders
    nothing_yet = not state.course or forms  # the first group; a later one has trained
    if state.asked > 1 or nothing_yet:
        return endings.end(state, now, log)
    after = replace(state, stop=state.stop or "interrupted")
    return after, [log, *stops(after)]


def stops(state: State) -> list[Action]:
    """Tell all members of the stop."""
    return [Send(worker, stop(state)) for worker in sorted(state.living)]


def stop(state: State) -> Stop:
    """The message to a member. A stop that a user asks for waits for no step of a rule."""
    return Stop(rule=state.stop, after=None if state.asked else state.stop_after)


def fired(state: State, rule: Fired) -> tuple[State, list[Action]]:
    """A rule asks for a stop. The shell answers the worker that sent the figures."""
    if not state.course or state.phase not in ("gathering", "training"):
        return state, []
    if state.stop:  # a validation may make a step the last, where its loss allowed one more
        sooner = state.stop_after is not None and rule.after < state.stop_after
        return replace(state, stop_after=rule.after) if sooner else state, []
    fields = {"by": "master", "rule": rule.rule, "step": rule.step, "why": rule.why}
    after = replace(state, stop=rule.rule, stop_after=rule.after)
    return after, [Log("stop_requested", fields)]


def rolled_back(state: State, step: int) -> State:
    """A rule that fired at a later step is evaluated again, once its figures are right."""
    if state.stop_after is None or state.stop_after < step or state.phase == "ending":
        return state
    return replace(state, stop="interrupted" if state.asked else "", stop_after=None)


def check_time(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    """Ask for a stop once the run has taken as long as it may."""
    limit = state.time_limit
    taken_s = limit.spent_s + now - limit.began if limit else 0.0
    if limit is None or taken_s < limit.limit_s:
        return state, []
    taken, most = readable_seconds(taken_s), readable_seconds(limit.limit_s)
    after, log = fired(
        state, Fired("time_limit", step, f"the run had taken {taken}, and its limit is {most}")
    )
    if not log:
        return state, []
    after = replace(after, stop_after=None)  # the clock does not go back with the run
    return after, [*log, *stops(after)]
