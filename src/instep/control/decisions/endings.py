"""How a run fails and ends: which worker is blamed, and when the run is over.

A failure that may follow from another one (a broken collective, an exit without a last
message) is held back for `BETTER_CAUSE_S`, so that the error names the cause. A part of
the decisions in `decide.py`, and as pure.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from instep.comm.protocol.messages import ON_REQUEST, Failed, Over, Whereabouts
from instep.control.decisions.actions import Action, Finish, KillAll, Log
from instep.control.decisions.phases import Phase
from instep.control.decisions.state import Blame, State
from instep.data.samples.last_read import describe_read, is_reading
from instep.errors import DIVERGED, INTERRUPTED, PeerError, WorkerError

BETTER_CAUSE_S = 1.0
"""How long a failure that may follow from another one is held back."""

EXIT_S = 5.0
"""How long processes may take to end after they were released or killed."""

UNSEEN = 256
"""Stands for an exit code that is not known; no process has it."""


def suspect(state: State, blame: Blame, now: float) -> tuple[State, list[Action]]:
    """A worker may have failed; what arrives within a second may show that another did."""
    if state.phase in ("ending", "releasing"):
        return state, []
    if state.suspect is not None:
        # a worker that ended without a message is a likelier cause than a broken connection
        silent = blame.failed.kind == "exit" and state.member(blame.worker).last_message is None
        if not silent or state.suspect.failed.kind != PeerError.__name__:
            return state, []
    return replace(state, suspect=blame, deadline=now + BETTER_CAUSE_S), []


def fail(state: State, blame: Blame, now: float) -> tuple[State, list[Action]]:
    """A worker has failed, and the run with it."""
    if state.phase == "ending":
        return state, []
    failure = blame.failed
    names = ("step", "phase", "kind", "cause", "where", "line")
    fields = {"worker": blame.worker, **{name: getattr(failure, name) for name in names}}
    return end(replace(state, blame=blame), now, Log("worker_failed", fields))


def end(state: State, now: float, *before: Action) -> tuple[State, list[Action]]:
    """Kill the processes that are left; the run is over once all of them have ended."""
    ending = replace(state, phase="ending", deadline=now + EXIT_S)
    ending, last = (ending, []) if state.living else finish(ending)
    return ending, [*before, KillAll(), *last]


def host_lost(state: State, code: int, detail: str, now: float) -> tuple[State, list[Action]]:
    """No process is left that could start a worker, and its workers end with it."""
    if state.phase in ("ending", "releasing"):
        return finish(state)
    cause = f"the process that starts the workers ended with code {code}. {detail}".strip()
    for worker in state.living:
        state = state.move(worker, Phase.ENDED)
    return fail(state, Blame(-1, failed("host", cause, 0)), now)


def finish(state: State) -> tuple[State, list[Action]]:
    """The run is over."""
    return replace(state, phase="ended", deadline=None), [finish_of(state)]


def finish_of(state: State) -> Finish:
    """How a run ended."""
    if state.blame is not None:
        failure = state.blame.failed
        committed = max(failure.step - 1, 0)  # it failed in the step after
        return Finish("failed", failure.kind, committed, failure.exit_code)
    done = state.done
    step = max((message.step for message in done.values()), default=0)
    rule = next((message.rule for message in done.values()), "interrupted")
    if rule == ON_REQUEST:  # of the rule that asked, unless a user's stop came into force sooner
        by_rule = state.stop_after is None or step > state.stop_after
        rule = state.stop if state.stop and by_rule else "interrupted"
    if rule == "interrupted" or not done.keys() >= set(state.group):
        return Finish("interrupted", "interrupted", step, INTERRUPTED)
    code = 0 if all(message.finite for message in done.values()) else DIVERGED
    completed = rule in ("epochs", "steps", "own loop")
    return Finish("completed" if completed else "stopped", rule, step, code)


def over(finish: Finish, blame: Blame | None) -> Over:
    """The message to the client about the end."""
    return Over(
        outcome=finish.outcome,
        rule=finish.rule,
        step=finish.step,
        exit_code=finish.exit_code,
        worker=blame.worker if blame else None,
        failed=blame.failed if blame else None,
    )


def of(code: int | None, step: int, place: Whereabouts | None = None) -> Failed:
    """The failure of a process that ended and sent no last message."""
    at = f" {describe_read(place)}" if is_reading(place) else ""
    if code is None:
        return failed("killed", f"the process has ended{at}, and its exit code is not known.", step)
    if code == UNSEEN:
        cause = (
            "the process disconnected without a message: it was killed, has ended, or lost its "
            "connection. Look at the output of the program that started it."
        )
        return failed("exit", cause, step)
    if code >= 0:
        return failed("exit", f"the process ended with code {code} and said nothing{at}.", step)
    name = signal_name(code)
    hints = {
        "SIGKILL": " A person or a program killed it, or the system ran out of memory.",
        "SIGSEGV": " Native code of a library crashed.",
        "SIGBUS": " A mapped file was cut short, or the disk or the shared memory may be full.",
    }
    cause = f"the process was killed by {name} (signal {-code}){at}.{hints.get(name, '')}"
    return failed("killed", cause, step)


def signal_name(code: int) -> str:
    """The name of the signal that ended a process, by its exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "an unknown signal"


def failed(kind: str, cause: str, step: int, phase: str = "") -> Failed:
    """The failure of a worker that cannot report it any more."""
    return Failed(
        kind=kind,
        cause=cause,
        where="",
        line="",
        step=step,
        phase=phase,
        exit_code=WorkerError.exit_code,
    )
