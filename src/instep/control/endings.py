"""How a run fails and ends: who is blamed, and when it is over. Part of the master's mind.

A failure that may be the consequence of another (a broken collective, an exit
without a last word) is held back for `SECOND_THOUGHT_S`, so that the cause is
named and not its echo. As `decide.py`, it knows no clock, socket or process.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from instep.comm.messages import TOLD, Failed, Whereabouts
from instep.control.news import Action, Blame, Finish, KillAll, Log, State
from instep.data.samples.last_read import describe_read, is_reading
from instep.errors import DIVERGED, INTERRUPTED, WorkerError

SECOND_THOUGHT_S = 1.0
"""How long a suspected consequence waits for its cause."""

FAREWELL_S = 5.0
"""How long processes may take to end after they were told to."""

UNSEEN = 256
"""In the place of an exit code that nobody could see; no process has it."""


def suspect(state: State, blame: Blame, now: float) -> tuple[State, list[Action]]:
    """Somebody may have failed; what arrives within a second may show that it was another."""
    if state.phase in ("ending", "releasing") or _is_likelier(state.suspect, blame, state):
        return state, []
    return replace(state, suspect=blame, deadline=now + SECOND_THOUGHT_S), []


def _is_likelier(suspected: Blame | None, other: Blame, state: State) -> bool:
    """Whether the suspect stands: an echo gives way to a worker that ended without a word."""
    if suspected is None:
        return False
    silent = other.failed.kind == "exit" and other.worker not in state.spoke
    return not (silent and suspected.failed.kind == "PeerError")


def fail(state: State, blame: Blame, now: float) -> tuple[State, list[Action]]:
    """Somebody has failed, and the run with it."""
    if state.phase == "ending":
        return state, []
    word = blame.failed
    log = Log(
        "worker_failed",
        {
            "worker": blame.worker,
            "step": word.step,
            "phase": word.phase,
            "kind": word.kind,
            "cause": word.cause,
            "where": word.where,
            "line": word.line,
        },
    )
    return end(replace(state, blame=blame), now, log)


def end(state: State, now: float, *before: Action) -> tuple[State, list[Action]]:
    """Kill what is left; the run is over once all of it has ended."""
    ending = replace(state, phase="ending", deadline=now + FAREWELL_S)
    if len(state.ended) >= len(state.joined):
        ended, last = finish(ending)
        return ended, [*before, KillAll(), *last]
    return ending, [*before, KillAll()]


def host_lost(state: State, code: int, detail: str, now: float) -> tuple[State, list[Action]]:
    """Nobody is left who could start a worker."""
    if state.phase in ("ending", "releasing"):
        return finish(state)
    cause = f"the process that starts the workers ended with code {code}. {detail}".strip()
    state = replace(state, ended=state.joined)
    return fail(state, Blame(-1, failed("host", cause, 0)), now)


def finish(state: State) -> tuple[State, list[Action]]:
    """The run is over."""
    return replace(state, phase="ended", deadline=None), [finish_of(state)]


def finish_of(state: State) -> Finish:
    """How a run ended."""
    step = max((word.step for word in state.done.values()), default=0)
    rule = next((word.rule for word in state.done.values()), "")
    rule = _told_by(state, step) if rule == TOLD else rule
    if state.blame is not None:
        word = state.blame.failed
        committed = max(word.step - 1, 0)  # it failed in the step after
        return Finish("failed", word.kind, committed, word.exit_code)
    if not state.done or not state.done.keys() >= set(state.members):
        return Finish("interrupted", "interrupted", step, INTERRUPTED)
    if rule == "interrupted":
        return Finish("interrupted", "interrupted", step, INTERRUPTED)
    code = 0 if all(word.finite for word in state.done.values()) else DIVERGED
    if rule in ("epochs", "steps", "own loop"):
        return Finish("completed", rule, step, code)
    return Finish("stopped", rule, step, code)


def _told_by(state: State, step: int) -> str:
    """Which of those that asked for a stop had it, where `step` was the last."""
    by_rule = state.stop_after is None or step > state.stop_after
    return state.stop if state.stop and by_rule else "interrupted"


def of(code: int | None, step: int, place: Whereabouts | None = None) -> Failed:
    """What is to be said of a process that ended and left no last word."""
    by_itself = code is not None and code >= 0
    return without_word(code or 0, step, place) if by_itself else by_signal(code, step, place)


def by_signal(code: int | None, step: int, place: Whereabouts | None = None) -> Failed:
    """What is to be said of a process that a signal ended, or whose end nobody saw."""
    if code is None:
        cause = f"the process has ended{_at(place)}, and nobody was there to see how."
        return failed("killed", cause, step)
    number, name = -code, signal_name(code)
    hints = {
        "SIGKILL": " Somebody killed it, or the system ran out of memory.",
        "SIGSEGV": " Native code of a library crashed.",
        "SIGBUS": " The disk or the shared memory may be full.",
    }
    cause = f"the process was killed by {name} (signal {number}){_at(place)}.{hints.get(name, '')}"
    return failed("killed", cause, step)


def signal_name(code: int) -> str:
    """Of the exit code of a process that a signal ended."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "an unknown signal"


def _at(place: Whereabouts | None) -> str:
    return f" {describe_read(place)}" if is_reading(place) else ""


def without_word(code: int, step: int, place: Whereabouts | None = None) -> Failed:
    """What is to be said of a process that ended by itself, and did not say why."""
    if code == UNSEEN:
        cause = (
            "the process went away without a word: it was killed, has ended, or lost its "
            "connection. Whoever started it may know how."
        )
        return failed("exit", cause, step)
    return failed("exit", f"the process ended with code {code} and said nothing{_at(place)}.", step)


def failed(kind: str, cause: str, step: int, phase: str = "") -> Failed:
    """A last word in the name of a worker that can say nothing more."""
    return Failed(
        kind=kind,
        cause=cause,
        where="",
        line="",
        step=step,
        phase=phase,
        exit_code=WorkerError.exit_code,
    )
