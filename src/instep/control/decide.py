"""The master's mind: what follows from what happened. No clock, socket or process in it.

`decide(state, news, now)` gives the next state and what is to be done about
it. The shell in `master.py` turns messages, exits and signals into news, and
carries the actions out; every story of a run is thus a table in a test. The
words of both are in `news.py`.

    gathering  ->  training  ->  releasing  ->  ended
        \\______________\\____________\\__>  ending  ->  ended

A generation ends in one of two ways. It breaks: somebody was lost, and the
rest wait for the next one where they are. Or it changes: who is to come is
ready, and all members leave it at the same commit. What makes a run fail,
and how it ends, is in `endings.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from instep.comm.messages import Done, Failed, Form, Regroup, Release, Stop
from instep.control import crash_loop, endings
from instep.control.news import (
    Action,
    Attached,
    Blame,
    Broke,
    Built,
    Ended,
    Formed,
    GoBack,
    HostCame,
    HostLost,
    Hung,
    Interrupted,
    Joined,
    Kill,
    KillAll,
    Log,
    News,
    Noticed,
    Restarted,
    Said,
    Scaled,
    Send,
    Silent,
    Start,
    State,
    Stuck,
    Tick,
    Unborn,
    Undone,
    WentBack,
)
from instep.control.stop_rules import Fired
from instep.data.samples.last_read import is_reading
from instep.errors import PeerError
from instep.units import readable_seconds

BROKEN_S = 0.3
"""How long a group that came apart waits for word of a process that has ended."""

FIRST_MEETING_S, MEETING_S = 30.0, 2.0
"""How long the members of the first, and of a later generation may take to find each other."""


def decide(state: State, news: News, now: float) -> tuple[State, list[Action]]:
    """What follows from `news`, at `now` (seconds on any steady clock)."""
    if state.phase == "ended":
        return state, []
    match news:
        case HostCame():
            return state, _starts(state)
        case Joined(worker):
            late: list[Action] = [Send(worker, Release())] if state.phase == "releasing" else []
            return replace(state, joined=state.joined | {worker}), late
        case Attached(worker, generation):
            return state, _reminders(state, worker, generation)
        case Built(worker, recovers):
            recovers = state.recovers and recovers
            return _advance(replace(state, built=state.built | {worker}, recovers=recovers), now)
        case Formed(worker, generation):
            return _formed(state, worker, generation, now)
        case Broke():
            return _broke(state, news, now)
        case Said(worker, word):
            return _said(state, worker, word, now)
        case Ended(worker):
            return _ended(state, news, now)
        case Unborn(worker, error):
            cause = f"its process could not be started: {error}. Make room, or use fewer workers."
            return endings.fail(state, Blame(worker, endings.failed("killed", cause, 0)), now)
        case Hung():
            return _hung(state, news)
        case Silent():
            return _silent(state, news, now)
        case Stuck():
            return _stuck(state, news, now)
        case Scaled(workers):
            return _scaled(state, workers, now)
        case Noticed(worker):
            return _noticed(state, worker, now)
        case HostLost(code, detail):
            return endings.host_lost(state, code, detail, now)
        case Interrupted():
            return _interrupted(state, news, now)
        case Fired():
            return _fired(state, news)
        case WentBack(checkpoint, step):
            back = replace(state, origin=checkpoint, origin_step=step, from_origin=True)
            return _next_generation(back, now)
        case Undone(step):
            return _undone(state, step), []
        case Restarted():
            return _restarted(state, now)
        case Tick(step):
            return _tick(state, step, now)


# ---- from one generation to the next


def _advance(state: State, now: float) -> tuple[State, list[Action]]:
    """Form the next generation, or prepare for it, if all that it shall have are there."""
    if not state.wanted <= state.built or state.ended & (state.wanted | set(state.members)):
        return state, []
    if state.phase == "gathering":
        holds = state.holders | state.bound
        if state.formed and not holds and not state.from_origin:
            return state, [GoBack()]
        return _next_generation(state, now)
    if state.phase != "training" or set(state.members) == state.wanted:
        return state, []
    whole = state.inside >= set(state.members) and not state.out
    if not whole or state.changing or state.done:
        return state, []
    regroup = Regroup(generation=state.generation)
    sends: list[Action] = [Send(worker, regroup) for worker in state.members]
    return replace(state, changing=True), sends


def _next_generation(state: State, now: float) -> tuple[State, list[Action]]:
    left_together = state.changing and state.out >= set(state.members)
    chosen = state.wanted | state.bound
    if not left_together or not state.holders & chosen:
        chosen |= state.holders  # one may have committed what nobody else has
    members = tuple(sorted(chosen))
    anew = state.from_origin and not state.bound
    after = replace(
        state,
        phase="training",
        generation=state.generation + 1,
        formed=True,
        members=members,
        begins_at=state.origin if anew else None,
        course=state.generation + 1 if anew else state.course,
        bound=state.bound | chosen,
        timeout_s=(MEETING_S * 2 ** min(state.broken, 6) if state.formed else FIRST_MEETING_S),
        inside=frozenset(),
        out=frozenset(),
        changing=False,
        done={},
        suspect=None,
        seen=None,
        deadline=None,
    )
    sends: list[Action] = [Send(worker, _form(after, worker)) for worker in members]
    if state.stop:  # whoever is new has not heard of it
        sends += _stops(after)
    log = Log(
        "generation_started",
        {
            "generation": after.generation,
            "members": list(members),
            "reason": state.why,
            "seconds": now - state.since,
        },
    )
    return after, [log, *sends]


def _form(state: State, worker: int) -> Form:
    after = state.stop_after
    return Form(
        generation=state.generation,
        rank=state.members.index(worker),
        members=list(state.members),
        timeout_s=state.timeout_s,
        checkpoint=state.begins_at,
        ends=state.begins_at is not None and after is not None and after < state.origin_step,
        marks=crash_loop.marks(state),
    )


def _formed(state: State, worker: int, generation: int, now: float) -> tuple[State, list[Action]]:
    if worker not in state.bound | state.holders or generation < state.course:
        return state, []  # from before it was lost, or before the run went back
    after = replace(
        state,
        holders=state.holders | {worker},
        from_origin=False,
    )
    if generation != state.generation:
        return after, []
    after, releases = _let_go(replace(after, inside=state.inside | {worker}))
    after, actions = _advance(after, now)  # the next change may be waiting
    return after, [*releases, *actions]


def _let_go(state: State) -> tuple[State, list[Action]]:
    """Who leaves may go once all that stay hold the state: until then it may be needed."""
    if not state.inside >= set(state.members):
        return state, []
    gone = state.leaving - set(state.members)
    after = replace(
        state,
        built=state.built - gone,
        holders=state.holders - gone,
    )
    return after, [Send(worker, Release()) for worker in sorted(gone)]


def _broke(state: State, news: Broke, now: float) -> tuple[State, list[Action]]:
    worker = news.worker
    if news.generation != state.generation:
        return state, []
    if news.cause and (state.seen is None or (news.mine and not state.seen.mine)):
        state = replace(state, seen=news)
    state = replace(state, out=state.out | {worker}, bound=state.bound - {worker})
    if state.phase == "gathering":
        return _advance(state, now)
    if state.phase != "training":
        return state, []
    if state.changing and state.out >= set(state.members) and state.wanted <= state.built:
        return _next_generation(state, now)
    if state.deadline is not None:
        return state, []
    # as a rule a process has ended, and its parent is about to say so
    timeout_s = BROKEN_S if not state.changing else MEETING_S
    return replace(state, deadline=now + timeout_s), []


def _stuck(state: State, news: Stuck, now: float) -> tuple[State, list[Action]]:
    if state.phase != "training" or news.generation != state.generation or not state.recovers:
        return state, []
    why = f"the exchange did not move for {readable_seconds(news.seconds)}, and every worker lives"
    return _apart(state, news.step, why, now)


def _apart(state: State, step: int, why: str, now: float) -> tuple[State, list[Action]]:
    """The same members once more, unless that has been of no use."""
    state, blame = crash_loop.judge_group(state, step, f"{why}.")
    return endings.fail(state, blame, now) if blame is not None else _again(state, why, now)


def _again(state: State, why: str, now: float) -> tuple[State, list[Action]]:
    """The same members, in another group."""
    state, starts = _recall(replace(state, why=why, broken=state.broken + 1, deadline=None))
    after = replace(state, phase="gathering", since=now)
    if starts:
        return after, starts
    advanced, actions = _advance(after, now)
    return advanced, actions


def _restarted(state: State, now: float) -> tuple[State, list[Action]]:
    """What is to be done again by a master that does not know how far the last one came."""
    if state.phase == "ending":
        return replace(state, deadline=now + endings.FAREWELL_S), [KillAll()]
    if state.phase == "releasing":
        return replace(state, deadline=now + endings.FAREWELL_S), []
    again: list[Action] = [*_starts(state), *[Kill(worker) for worker in sorted(state.hung)]]
    if state.phase == "gathering":
        after, actions = _advance(state, now)
        return after, [*again, *actions]
    if not state.inside >= set(state.members) and state.recovers:
        why = "the master was lost while the group was forming"
        after, actions = _again(state, why, now)
        return after, [*again, *actions]
    deadline = now + MEETING_S if state.out else state.deadline
    return replace(state, deadline=deadline), again


def _reminders(state: State, worker: int, generation: int) -> list[Action]:
    """What a worker may have missed."""
    if worker not in state.joined:
        return []
    sends: list[Action] = []
    if worker in state.members and generation < state.generation and state.phase == "training":
        sends.append(Send(worker, _form(state, worker)))
    if state.stop:
        sends.append(Send(worker, _stop(state)))
    if state.changing and worker in state.members:
        sends.append(Send(worker, Regroup(generation=state.generation)))
    gone = state.inside >= set(state.members) and worker not in state.members
    if state.phase == "releasing" or (state.formed and gone and worker in state.leaving):
        sends.append(Send(worker, Release()))
    return sends


# ---- who is wanted


def _starts(state: State) -> list[Action]:
    if state.phase not in ("gathering", "training"):
        return []
    return [Start(worker) for worker in sorted(state.wanted - state.joined - state.ended)]


def _scaled(state: State, workers: int, now: float) -> tuple[State, list[Action]]:
    if state.phase not in ("gathering", "training") or workers == len(state.wanted):
        return state, []
    before = len(state.wanted)
    wanted = frozenset(sorted(state.wanted)[:workers])
    wanted |= frozenset(_unused(state, workers - len(wanted)))
    why = f"scaled from {before} to {workers} workers"
    log = Log("scaled", {"before": before, "workers": workers})
    return _wanting(state, wanted, why, log, now)


def _noticed(state: State, worker: int, now: float) -> tuple[State, list[Action]]:
    if worker not in state.wanted or state.phase not in ("gathering", "training"):
        return state, []
    if not state.recovers:
        return state, []  # it stays as long as it can
    (successor,) = _unused(state, 1)
    why = f"worker {worker} was told to leave; worker {successor} takes its place"
    log = Log("worker_leaving", {"worker": worker, "successor": successor})
    return _wanting(state, state.wanted - {worker} | {successor}, why, log, now)


def _wanting(
    state: State, wanted: frozenset[int], why: str, log: Log, now: float
) -> tuple[State, list[Action]]:
    idle = state.phase == "training" and set(state.members) == state.wanted
    after = replace(state, wanted=wanted, why=why, since=now if idle else state.since)
    starts = [Start(worker) for worker in sorted(wanted - state.wanted - state.joined)]
    after, actions = _advance(after, now)
    return after, [log, *starts, *actions]


def _unused(state: State, count: int) -> list[int]:
    """The lowest numbers that nobody has, or is about to have."""
    taken = state.wanted | state.joined | state.ended | set(state.members)
    return [n for n in range(len(taken) + count) if n not in taken][:count]


# ---- who is lost


def _ended(state: State, news: Ended, now: float) -> tuple[State, list[Action]]:
    worker, code = news.worker, news.code
    if worker in state.done and state.phase == "training":
        return replace(state, ended=state.ended | {worker}), []  # it had nothing left to do
    replaced = worker not in state.joined or (state.recovers and worker not in state.spoke)
    reads = is_reading(news.place) and not news.place.ahead
    by_a_read = reads and worker not in state.spoke  # native code may call exit()
    if code == PeerError.exit_code and replaced and not by_a_read:
        news, code = replace(news, code=None), None  # its master was lost, or had no use for it
    unexplained = code is None or code < 0 or by_a_read
    if state.phase in ("gathering", "training"):
        spare = worker not in state.wanted and (
            state.phase == "gathering" or worker not in state.members
        )
        if spare and state.recovers:  # it was released, or went before it was
            return _advance(_without(state, {worker}), now)
        if unexplained and state.recovers:
            return _replace(state, news, now)
    state = replace(state, ended=state.ended | {worker})
    if state.phase in ("releasing", "ending"):
        return endings.finish(state) if state.ended >= state.joined else (state, [])
    blame = Blame(worker, endings.of(code, news.step, news.place if unexplained else None))
    if unexplained:  # a signal is a cause in itself
        return endings.fail(state, blame, now)
    return endings.suspect(state, blame, now)


def _replace(state: State, news: Ended, now: float) -> tuple[State, list[Action]]:
    """Somebody was lost: bring up another in its place, unless that has been of no use."""
    worker = news.worker
    state, word, ends = crash_loop.judge(state, news)
    if ends:
        return endings.fail(replace(state, ended=state.ended | {worker}), Blame(worker, word), now)
    cause = word.cause
    since = state.since if state.phase == "gathering" and state.formed else now
    after = replace(
        _without(state, {worker}),
        phase="gathering",
        spoke=state.spoke - {worker},
        since=since if state.formed else state.since,
        why=f"worker {worker} was lost: {cause}",
        changing=False,
        broken=0,
        apart=None,
        deadline=state.deadline if state.suspect else None,
    )
    log = Log("worker_lost", {"worker": worker, "step": word.step, "cause": cause})
    after, starts = _recall(after)
    anew: list[Action] = [Start(worker)] if worker in after.wanted else []
    advanced, actions = (after, []) if anew or starts else _advance(after, now)
    return advanced, [log, *anew, *starts, *actions]


def _without(state: State, gone: Iterable[int]) -> State:
    """Nothing is known of these any more."""
    out = frozenset(gone)
    return replace(
        state,
        from_origin=state.from_origin and not out & state.bound,  # one may have gone on
        joined=state.joined - out,
        built=state.built - out,
        holders=state.holders - out,
        bound=state.bound - out,
        inside=state.inside - out,
        ended=state.ended - out,
        hung={worker: how for worker, how in state.hung.items() if worker not in out},
        loops=state.loops - out,
    )


def _recall(state: State) -> tuple[State, list[Action]]:
    """Those that had finished must finish again; those of them that have ended come anew."""
    gone = state.ended & frozenset(state.done)
    after = replace(_without(state, gone), done={})
    return after, [Start(worker) for worker in sorted(gone & after.wanted)]


def _hung(state: State, news: Hung) -> tuple[State, list[Action]]:
    worker = news.worker
    known = worker in state.joined and worker not in state.hung
    if not known or not state.recovers or state.phase not in ("gathering", "training"):
        return state, []
    at = f" ({news.where})" if news.where else ""
    during = f" at step {news.step}" if news.step else ""
    how = f"it {news.how} in {news.phase}{during}{at}."
    fields = {"worker": worker, "step": news.step, "phase": news.phase, "how": news.how}
    log = Log("worker_hung", {**fields, "where": news.where})
    loops = state.loops | {worker} if news.loops else state.loops
    return replace(state, hung=state.hung | {worker: how}, loops=loops), [log, Kill(worker)]


def _silent(state: State, news: Silent, now: float) -> tuple[State, list[Action]]:
    known = news.worker in state.joined - state.ended
    if not known or state.recovers or state.phase not in ("gathering", "training"):
        return state, []
    word = endings.failed("silent", news.cause, news.step, news.phase)
    return endings.fail(state, Blame(news.worker, word), now)


# ---- who speaks


def _said(state: State, worker: int, word: Done | Failed, now: float) -> tuple[State, list[Action]]:
    if isinstance(word, Done) and word.generation != state.generation:
        return state, []  # it has to finish again, with the others
    state = replace(state, spoke=state.spoke | {worker})
    if isinstance(word, Done):
        return _done(replace(state, done=state.done | {worker: word}), now)
    blame = Blame(worker, word)
    echo = word.kind == "PeerError"
    return endings.suspect(state, blame, now) if echo else endings.fail(state, blame, now)


def _done(state: State, now: float) -> tuple[State, list[Action]]:
    if state.phase != "training" or not state.done.keys() >= set(state.members):
        return state, []
    releases: list[Action] = [Send(worker, Release()) for worker in sorted(state.joined)]
    return replace(state, phase="releasing", deadline=now + endings.FAREWELL_S), releases


# ---- stops, and time


def _interrupted(state: State, news: Interrupted, now: float) -> tuple[State, list[Action]]:
    state = replace(state, asked=state.asked + 1)
    if state.phase in ("ending", "releasing"):
        return state, []
    fields = {"rule": "interrupted", "step": news.step, "why": f"{news.by} arrived"}
    log = Log("stop_requested", {"by": news.by, **fields})
    first = not state.lost  # later, whoever is not ready comes to a group that is
    nothing_yet = not state.formed or (first and state.phase == "training" and not news.ready)
    if state.asked > 1 or nothing_yet:
        return endings.end(state, now, log)
    after = replace(state, stop=state.stop or "interrupted")
    return after, [log, *_stops(after)]


def _stops(state: State) -> list[Action]:
    return [Send(worker, _stop(state)) for worker in sorted(state.joined)]


def _stop(state: State) -> Stop:
    """Who asks from outside does not wait for the step of a rule."""
    return Stop(rule=state.stop, after=None if state.asked else state.stop_after)


def _fired(state: State, fired: Fired) -> tuple[State, list[Action]]:
    """A rule wants a stop. Whoever told its figures hears of it from the shell."""
    if not state.formed or state.phase not in ("gathering", "training"):
        return state, []
    if state.stop:  # a step may be the last, and not the one after it, by its validation
        sooner = state.stop_after is not None and fired.after < state.stop_after
        return replace(state, stop_after=fired.after) if sooner else state, []
    fields = {"by": "master", "rule": fired.rule, "step": fired.step, "why": fired.why}
    after = replace(state, stop=fired.rule, stop_after=fired.after)
    return after, [Log("stop_requested", fields)]


def _undone(state: State, step: int) -> State:
    """A rule that fired by figures of a later step is asked again, once they are right."""
    if state.stop_after is None or state.stop_after < step or state.phase == "ending":
        return state
    return replace(state, stop="interrupted" if state.asked else "", stop_after=None)


def _watch_time(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    limit = state.time_limit
    taken_s = limit.spent_s + now - limit.began if limit else 0.0
    if limit is None or taken_s < limit.limit_s:
        return state, []
    taken, most = readable_seconds(taken_s), readable_seconds(limit.limit_s)
    after, log = _fired(
        state, Fired("time_limit", step, f"the run had taken {taken}, and its limit is {most}")
    )
    if not log:
        return state, []
    after = replace(after, stop_after=None)  # the clock does not go back with the run
    return after, [*log, *_stops(after)]


def _tick(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    state, stops = _watch_time(state, step, now)
    if stops:
        return state, stops
    if state.deadline is None or now < state.deadline:
        return state, []
    if state.phase in ("releasing", "ending"):
        ended, finish = endings.finish(state)
        return ended, [KillAll(), *finish]
    if state.suspect is not None:
        return endings.fail(state, state.suspect, now)
    return _apart(state, step, "the group came apart, and every process lives", now)
