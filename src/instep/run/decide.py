"""The master's mind: what follows from what happened. No clock, socket or process in it.

`decide(state, news, now)` gives the next state and what is to be done about
it. The shell in `master.py` turns messages, exits and signals into news, and
carries the actions out; every story of a run is thus a table in a test.

    gathering  ->  training  ->  releasing  ->  ended
        \\______________\\____________\\__>  ending  ->  ended

A failure that may be the consequence of another (a broken collective, an exit
without a last word) is held back for `SECOND_THOUGHT_S`, so that the cause is
named and not its echo.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from instep.comm.messages import AnyMessage, Done, Failed, Form, Release, Stop
from instep.errors import INTERRUPTED, WorkerError
from instep.run.stop_rules import Fired
from instep.units import readable_seconds

SECOND_THOUGHT_S = 1.0
"""How long a suspected consequence waits for its cause."""

BROKEN_S = 0.3
"""How long a group that came apart waits for word of a process that has ended."""

FIRST_MEETING_S, MEETING_S = 30.0, 2.0
"""How long the members of the first, and of a later generation may take to find each other."""

MOST_LOSSES = 10
"""A worker that is lost so often while no step is committed is not replaced again."""

FAREWELL_S = 5.0
"""How long processes may take to end after they were told to."""

TOLD = "told"
"""What a worker gives as its rule that stopped because the master wanted it to."""

# ---- news: what can happen


@dataclass(frozen=True)
class Joined:
    """A worker has introduced itself."""

    worker: int


@dataclass(frozen=True)
class Built:
    """A worker has all that it needs but the others."""

    worker: int
    recovers: bool = True
    """Whether it can be in one group after another."""


@dataclass(frozen=True)
class Said:
    """A worker's last word: it has finished, or it cannot go on."""

    worker: int
    word: Done | Failed


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended, or hung up and has no process that we could watch."""

    worker: int
    code: int
    step: int
    """The step that it was computing, as far as is known; 0 before the first."""
    committed: int = 0
    """The last step that any worker has committed, as far as is known."""


@dataclass(frozen=True)
class HostLost:
    """The process that starts workers has ended."""

    code: int
    detail: str = ""


@dataclass(frozen=True)
class Interrupted:
    """Somebody wants the run to stop: once for the next commit, twice for now."""

    by: str
    ready: bool = True
    """Whether every worker has said that its first step is about to begin."""
    step: int = 0
    """The last that is known to have been committed."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    step: int = 0
    """The last that is known to have been committed."""


@dataclass(frozen=True)
class Formed:
    """A worker is in the group of a generation, and holds its state."""

    worker: int
    generation: int


@dataclass(frozen=True)
class WentBack:
    """The run's files are those of this checkpoint again; empty for the beginning."""

    checkpoint: str


@dataclass(frozen=True)
class Broke:
    """A worker's group has come apart."""

    worker: int
    generation: int


News: TypeAlias = (
    Joined
    | Built
    | Formed
    | Said
    | Ended
    | HostLost
    | Interrupted
    | Fired
    | Broke
    | WentBack
    | Tick
)

# ---- actions: what can be done


@dataclass(frozen=True)
class Send:
    """Say something to a worker."""

    worker: int
    message: AnyMessage


@dataclass(frozen=True)
class Log:
    """Write an event."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class KillAll:
    """End every process that is left."""


@dataclass(frozen=True)
class GoBack:
    """Take back what was committed after the newest checkpoint: nobody is left who has it."""


@dataclass(frozen=True)
class Start:
    """Bring up a process under this worker's number."""

    worker: int


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    outcome: Literal["completed", "stopped", "failed", "interrupted"]
    rule: str
    step: int
    """The last that is known to have been committed."""
    exit_code: int


Action: TypeAlias = Send | Log | KillAll | GoBack | Start | Finish

# ---- state


@dataclass(frozen=True)
class Blame:
    """Which worker failed, and how."""

    worker: int
    failed: Failed


@dataclass(frozen=True)
class TimeLimit:
    """How long the whole run may take."""

    limit_s: float
    began: float
    """When this session of the run began, on the clock of `decide`'s `now`."""
    spent_s: float = 0.0
    """What earlier sessions took."""


@dataclass(frozen=True)
class State:
    """All that the master knows of a run's members."""

    workers: int
    recovers: bool = False
    """Whether a worker that is lost is replaced."""
    phase: Literal["gathering", "training", "releasing", "ending", "ended"] = "gathering"
    joined: frozenset[int] = frozenset()
    """Who has introduced itself, and lives."""
    built: frozenset[int] = frozenset()
    """Who is ready to be in a group."""
    ended: frozenset[int] = frozenset()
    spoke: frozenset[int] = frozenset()
    """Who has had a last word."""
    done: dict[int, Done] = field(default_factory=dict)
    generation: int = 0
    formed: bool = False
    """Whether there has been a generation in this session."""
    since: float = 0.0
    """When members began to be gathered for the next generation."""
    why: str = "start"
    """What made the next generation necessary."""
    origin: str = ""
    """The checkpoint that a generation begins from where no member holds state."""
    from_origin: bool = True
    """Whether the next generation begins there."""
    holders: frozenset[int] = frozenset()
    """Who holds the state of the run."""
    lost: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Worker to the committed step when it was lost last, and how often it was lost there."""
    broken: int = 0
    """How often groups have come apart since somebody was lost last."""
    asked: int = 0
    """How often a stop was asked for from outside."""
    stop: str = ""
    """The rule that asked for a stop first; it stands, whatever asks after it."""
    time_limit: TimeLimit | None = None
    suspect: Blame | None = None
    blame: Blame | None = None
    deadline: float | None = None
    """When patience ends: with a suspect, or with processes that should have ended."""


def decide(state: State, news: News, now: float) -> tuple[State, list[Action]]:
    """What follows from `news`, at `now` (seconds on any steady clock)."""
    if state.phase == "ended":
        return state, []
    match news:
        case Joined(worker):
            return replace(state, joined=state.joined | {worker}), []
        case Built(worker, recovers):
            recovers = state.recovers and recovers
            return _built(replace(state, built=state.built | {worker}, recovers=recovers), now)
        case Said(worker, word):
            return _said(state, worker, word, now)
        case Ended(worker, code, step, committed):
            return _ended(state, worker, code, step, committed, now)
        case HostLost(code, detail):
            return _host_lost(state, code, detail, now)
        case Interrupted():
            return _interrupted(state, news, now)
        case Fired():
            return _fired(state, news)
        case Broke(_, generation):
            return _broke(state, generation, now)
        case Formed(worker, generation):
            return _formed(state, worker, generation), []
        case WentBack(checkpoint):
            return _next_generation(replace(state, origin=checkpoint), now)
        case Tick(step):
            return _tick(state, step, now)


def _built(state: State, now: float) -> tuple[State, list[Action]]:
    if state.phase != "gathering" or len(state.built) < state.workers or state.ended:
        return state, []
    if state.formed and not state.holders:  # by now, whoever holds the state has said so
        return replace(state, from_origin=True), [GoBack()]
    return _next_generation(state, now)


def _next_generation(state: State, now: float) -> tuple[State, list[Action]]:
    members = sorted(state.joined)
    generation = state.generation + 1
    patience_s = FIRST_MEETING_S if not state.formed else MEETING_S * 2 ** min(state.broken, 6)
    sends: list[Action] = [
        Send(
            worker,
            Form(
                generation=generation,
                rank=rank,
                members=members,
                patience_s=patience_s,
                checkpoint=state.origin if state.from_origin else None,
            ),
        )
        for rank, worker in enumerate(members)
    ]
    if state.stop:  # whoever is new has not heard of it
        sends += _stops(state, state.stop)
    log = Log(
        "generation_started",
        {
            "generation": generation,
            "members": members,
            "reason": state.why,
            "seconds": now - state.since,
        },
    )
    after = replace(state, phase="training", generation=generation, formed=True, done={})
    return replace(after, suspect=None, deadline=None), [log, *sends]


def _formed(state: State, worker: int, generation: int) -> State:
    if generation != state.generation or worker not in state.joined:
        return state  # from before it was lost, or before the run went back
    return replace(state, holders=state.holders | {worker}, from_origin=False)


def _said(state: State, worker: int, word: Done | Failed, now: float) -> tuple[State, list[Action]]:
    if isinstance(word, Done) and word.generation != state.generation:
        return state, []  # it has to finish again, with the others
    state = replace(state, spoke=state.spoke | {worker})
    if isinstance(word, Done):
        return _done(replace(state, done=state.done | {worker: word}), now)
    blame = Blame(worker, word)
    echo = word.kind == "PeerError"
    return _suspect(state, blame, now) if echo else _fail(state, blame, now)


def _done(state: State, now: float) -> tuple[State, list[Action]]:
    if state.phase != "training" or len(state.done) < state.workers:
        return state, []
    releases: list[Action] = [Send(worker, Release()) for worker in sorted(state.done)]
    return replace(state, phase="releasing", deadline=now + FAREWELL_S), releases


def _suspect(state: State, blame: Blame, now: float) -> tuple[State, list[Action]]:
    if state.phase in ("ending", "releasing") or _is_likelier(state.suspect, blame, state):
        return state, []
    return replace(state, suspect=blame, deadline=now + SECOND_THOUGHT_S), []


def _is_likelier(suspect: Blame | None, other: Blame, state: State) -> bool:
    """Whether `suspect` stands: an echo gives way to a worker that ended without a word."""
    if suspect is None:
        return False
    silent = other.failed.kind == "exit" and other.worker not in state.spoke
    return not (silent and suspect.failed.kind == "PeerError")


def _fail(state: State, blame: Blame, now: float) -> tuple[State, list[Action]]:
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
    return _end(replace(state, blame=blame), now, log)


def _end(state: State, now: float, *before: Action) -> tuple[State, list[Action]]:
    """Kill what is left; the run is over once all of it has ended."""
    ending = replace(state, phase="ending", deadline=now + FAREWELL_S)
    if len(state.ended) >= len(state.joined):
        ended, finish = _finish(ending)
        return ended, [*before, KillAll(), *finish]
    return ending, [*before, KillAll()]


def _ended(
    state: State, worker: int, code: int, step: int, committed: int, now: float
) -> tuple[State, list[Action]]:
    if worker in state.done and state.phase == "training":
        return replace(state, ended=state.ended | {worker}), []  # it had nothing left to do
    if code < 0 and state.recovers and state.phase in ("gathering", "training"):
        return _replace(state, Blame(worker, _by_signal(-code, step)), committed, now)
    state = replace(state, ended=state.ended | {worker})
    gone = len(state.ended) >= max(len(state.joined), 1)
    if state.phase in ("releasing", "ending"):
        return _finish(state) if gone else (state, [])
    if code < 0:  # a signal is a cause in itself
        return _fail(state, Blame(worker, _by_signal(-code, step)), now)
    return _suspect(state, Blame(worker, _without_word(code, step)), now)


def _replace(state: State, blame: Blame, committed: int, now: float) -> tuple[State, list[Action]]:
    """Somebody was lost: bring up another in its place, unless that has been of no use."""
    worker, word = blame.worker, blame.failed
    before, times = state.lost.get(worker, (-1, 0))
    times = times + 1 if committed <= before else 1
    if times >= MOST_LOSSES:
        cause = f"{word.cause} It happened {times} times and no step was committed."
        state = replace(state, ended=state.ended | {worker})
        return _fail(state, Blame(worker, _failed(word.kind, cause, word.step)), now)
    since = state.since if state.phase == "gathering" and state.formed else now
    after = replace(
        state,
        phase="gathering",
        joined=state.joined - {worker},
        built=state.built - {worker},
        holders=state.holders - {worker},
        spoke=state.spoke - {worker},
        since=since if state.formed else state.since,
        why=f"worker {worker} was lost: {word.cause}",
        lost=state.lost | {worker: (committed, times)},
        broken=0,
        deadline=state.deadline if state.suspect else None,
    )
    log = Log("worker_lost", {"worker": worker, "step": word.step, "cause": word.cause})
    after, starts = _recall(after)
    return after, [log, Start(worker), *starts]


def _recall(state: State) -> tuple[State, list[Action]]:
    """Those that had finished must finish again; those of them that have ended come anew."""
    gone = state.ended & frozenset(state.done)
    after = replace(
        state,
        joined=state.joined - gone,
        built=state.built - gone,
        holders=state.holders - gone,
        ended=state.ended - gone,
        done={},
    )
    return after, [Start(worker) for worker in sorted(gone)]


def _broke(state: State, generation: int, now: float) -> tuple[State, list[Action]]:
    """A group came apart. As a rule a process has ended, and its parent is about to say so."""
    if state.phase != "training" or generation != state.generation or state.deadline is not None:
        return state, []
    return replace(state, deadline=now + BROKEN_S), []


def _by_signal(number: int, step: int) -> Failed:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "an unknown signal"
    hints = {
        "SIGKILL": " Somebody killed it, or the system ran out of memory.",
        "SIGSEGV": " Native code of a library crashed.",
        "SIGBUS": " The disk or the shared memory may be full.",
    }
    cause = f"the process was killed by {name} (signal {number}).{hints.get(name, '')}"
    return _failed("killed", cause, step)


def _without_word(code: int, step: int) -> Failed:
    return _failed("exit", f"the process ended with code {code} and said nothing.", step)


def _failed(kind: str, cause: str, step: int) -> Failed:
    return Failed(
        kind=kind,
        cause=cause,
        where="",
        line="",
        step=step,
        phase="",
        exit_code=WorkerError.exit_code,
    )


def _host_lost(state: State, code: int, detail: str, now: float) -> tuple[State, list[Action]]:
    if state.phase in ("ending", "releasing"):
        return _finish(state)
    cause = f"the process that starts the workers ended with code {code}. {detail}".strip()
    state = replace(state, ended=state.joined)
    return _fail(state, Blame(-1, _failed("host", cause, 0)), now)


def _interrupted(state: State, news: Interrupted, now: float) -> tuple[State, list[Action]]:
    state = replace(state, asked=state.asked + 1)
    if state.phase in ("ending", "releasing"):
        return state, []
    fields = {"rule": "interrupted", "step": news.step, "why": f"{news.by} arrived"}
    log = Log("stop_requested", {"by": news.by, **fields})
    first = not state.lost  # later, whoever is not ready comes to a group that is
    nothing_yet = not state.formed or (first and state.phase == "training" and not news.ready)
    if state.asked > 1 or nothing_yet:
        return _end(state, now, log)
    return replace(state, stop=state.stop or "interrupted"), [log, *_stops(state, "interrupted")]


def _stops(state: State, rule: str) -> list[Action]:
    return [Send(worker, Stop(rule=rule)) for worker in sorted(state.joined)]


def _fired(state: State, fired: Fired) -> tuple[State, list[Action]]:
    """A rule wants a stop. Whoever told its figures hears of it from the shell."""
    if not state.formed or state.phase not in ("gathering", "training") or state.stop:
        return state, []
    fields = {"by": "master", "rule": fired.rule, "step": fired.step, "why": fired.why}
    return replace(state, stop=fired.rule), [Log("stop_requested", fields)]


def _watch_time(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    limit = state.time_limit
    taken_s = limit.spent_s + now - limit.began if limit else 0.0
    if limit is None or taken_s < limit.limit_s:
        return state, []
    taken, most = readable_seconds(taken_s), readable_seconds(limit.limit_s)
    after, log = _fired(
        state, Fired("time_limit", step, f"the run had taken {taken}, and its limit is {most}")
    )
    return after, [*log, *(_stops(state, "time_limit") if log else [])]


def _tick(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    state, stops = _watch_time(state, step, now)
    if stops:
        return state, stops
    if state.deadline is None or now < state.deadline:
        return state, []
    if state.phase in ("releasing", "ending"):
        ended, finish = _finish(state)
        return ended, [KillAll(), *finish]
    if state.suspect is not None:
        return _fail(state, state.suspect, now)
    why = "the group came apart, and every process lives"
    state, starts = _recall(replace(state, why=why, broken=state.broken + 1, deadline=None))
    if starts:
        return replace(state, phase="gathering", since=now), starts
    return _next_generation(state, now)


def _finish(state: State) -> tuple[State, list[Action]]:
    step = max((word.step for word in state.done.values()), default=0)
    rule = next((word.rule for word in state.done.values()), "")
    rule = state.stop if rule == TOLD and state.stop else rule
    if state.blame is not None:
        word = state.blame.failed
        committed = max(word.step - 1, 0)  # it failed in the step after
        finish = Finish("failed", word.kind, committed, word.exit_code)
    elif len(state.done) < state.workers or rule in ("interrupted", TOLD):
        finish = Finish("interrupted", "interrupted", step, INTERRUPTED)
    elif rule in ("epochs", "steps", "own loop"):
        finish = Finish("completed", rule, step, 0)
    else:
        finish = Finish("stopped", rule, step, 0)
    return replace(state, phase="ended", deadline=None), [finish]
