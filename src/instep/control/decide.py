"""The master's decisions: a pure function, without clock, socket or process.

`decide(state, event, now)` returns the next state and the actions to take. The shell in
`master.py` turns messages, exits and signals into events, and carries the actions out; so
any run can be written down as a list of events, and tested. Both vocabularies, and the
phases that a member goes through, are in `state.py`.

    gathering  ->  training  ->  releasing  ->  ended
        \\______________\\____________\\__>  ending  ->  ended

Several processes may share a replica (`State.fellows`). Where one of them is lost, the others are
killed, and all are started again: the *restart* of a replica.

A generation ends in one of two ways. It breaks: a member was lost, and the others wait
for the next one. Or it changes: those that shall join are ready, and all members leave
it at the same commit. What is lost with a process is in `losses.py`, why a run stops in
`stops.py`, how it fails and ends in `endings.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from instep.comm.protocol.messages import Done, Failed, Form, Regroup, Release
from instep.control import crash_loop, endings, losses, stops
from instep.control.state import (
    IN_A_GROUP,
    KILLED,
    LIVING,
    Action,
    Blame,
    Broke,
    Built,
    Ended,
    Event,
    Formed,
    GoBack,
    HostJoined,
    HostLost,
    Hung,
    Interrupted,
    Joined,
    Kill,
    KillAll,
    LastMessage,
    Log,
    Noticed,
    Phase,
    Reconnected,
    Restarted,
    RolledBack,
    Scaled,
    Send,
    Silent,
    Start,
    StartFailed,
    State,
    Stuck,
    Tick,
    WentBack,
)
from instep.control.stop_rules import Fired
from instep.data.samples.last_read import is_reading
from instep.errors import PeerError
from instep.job.spec import JobSpec
from instep.units import readable_seconds

BROKEN_S = 0.3
"""How long the master waits, after a group came apart, to learn which process has ended."""

BUILDING_S = 1.0
"""How long the others wait for a replacement that gets ready, before they continue without it."""

WAITING_S = 5.0
"""How long no process has come before it is said which wait for a fellow."""

FIRST_MEETING_S, MEETING_S = 30.0, 2.0
"""How long the members of the first, and of a later generation may take to connect, at least."""

MEETING_EACH_S = 0.03
"""How much time each of many members adds."""

_GETTING_READY = frozenset({Phase.ABSENT, Phase.KILLED, Phase.BUILDING, Phase.READY})
"""Where the processes of a replica are until all of them can be in a group."""


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
            return state, _starts(state)
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
            return _last_message(state, worker, message, now)
        case Ended():
            return _ended(state, event, now)
        case StartFailed(worker, error):
            cause = f"its process could not be started: {error}. Make room, or use fewer workers."
            return endings.fail(state, Blame(worker, endings.failed("killed", cause, 0)), now)
        case Hung():
            return _hung(state, event)
        case Silent():
            return _silent(state, event, now)
        case Stuck():
            return _stuck(state, event, now)
        case Scaled():
            return _scaled(state, event, now)
        case Noticed(worker):
            return _noticed(state, worker, now)
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
            return _next_generation(back, now)
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


# ---- from one generation to the next


def _advance(state: State, now: float) -> tuple[State, list[Action]]:
    """Form the next generation, or ask for it, once all members that it shall have are ready."""
    # of one that is being killed it is not known what it still writes
    ended = any(state.member(n).phase in (Phase.ENDED, Phase.KILLED) for n in state.group)
    if ended or not (state.needed <= state.ready or _can_do_without(state, now)):
        return state, []
    if state.phase == "gathering":
        held = state.holders or state.those(IN_A_GROUP) or state.from_checkpoint
        return _next_generation(state, now) if held or not state.course else (state, [GoBack()])
    inside = all(state.member(n).phase is Phase.INSIDE for n in state.group)
    if state.phase != "training" or set(state.group) == state.wanted or not inside:
        return state, []
    if state.changing or state.done:
        return state, []
    regroup = Regroup(generation=state.generation)
    sends: list[Action] = [Send(worker, regroup) for worker in state.group]
    return replace(state, changing=True, since=now), sends


def _can_do_without(state: State, now: float) -> bool:
    """Whether the others train while a replacement is getting ready, and take it in later.

    Not where members own state: its replacement takes up what the lost one had.
    """
    if state.phase != "gathering" or state.drains or now < state.since + BUILDING_S:
        return False
    missing = state.wanted - state.whole(state.ready)
    getting_ready = missing <= state.those(_GETTING_READY)
    work_goes_on = bool(state.holders & state.wanted - state.servers)
    return getting_ready and not missing & state.servers and work_goes_on


def _next_generation(state: State, now: float) -> tuple[State, list[Action]]:
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
    sends: list[Action] = [Send(worker, _form(after, worker)) for worker in after.group]
    if state.stop:  # newcomers do not know it yet
        sends += stops.stops(after)
    fields = {"generation": generation, "members": list(after.group)}
    log = Log("generation_started", {**fields, "reason": state.why, "seconds": now - state.since})
    after, waits = _say_who_waits(after)
    return after, [log, *waits, *sends]


def _meeting_s(state: State, members: int) -> float:
    """How long the members of the next generation may take to connect."""
    each_s = MEETING_EACH_S * members
    if not state.course:
        return max(FIRST_MEETING_S, each_s)
    return float(max(MEETING_S, each_s) * 2 ** min(state.broken, 6))


def _say_who_waits(state: State) -> tuple[State, list[Action]]:
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


def _form(state: State, worker: int) -> Form:
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


def _built(state: State, event: Built, now: float) -> tuple[State, list[Action]]:
    if state.member(event.worker).phase in LIVING - {Phase.BUILDING}:
        return state, []  # sent again, as the master was lost, or released meanwhile
    state = state.move(event.worker, Phase.READY)
    if event.holds:
        state = state.note(event.worker, held=max(state.course, 1))
    recovers, together = state.recovers and event.recovers, state.together or event.together
    return _advance(replace(state, recovers=recovers, together=together), now)


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
    return _advance(state, now)  # the next change may be due


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
        return _advance(state, now)
    if state.phase != "training":
        return state, []
    if state.changing and state.left and state.needed <= state.ready:
        return _next_generation(state, now)
    if state.deadline is not None:
        return state, []
    # usually a process has ended, and its parent is about to report it
    wait_s = MEETING_S if state.changing else BROKEN_S
    return replace(state, deadline=now + wait_s), []


def _stuck(state: State, event: Stuck, now: float) -> tuple[State, list[Action]]:
    if state.phase != "training" or event.generation != state.generation or not state.recovers:
        return state, []
    seconds = readable_seconds(event.seconds)
    why = f"the exchange made no progress for {seconds}, and every worker is alive"
    return _came_apart(state, event.step, why, now)


def _came_apart(state: State, step: int, why: str, now: float) -> tuple[State, list[Action]]:
    """Form the group of the same members again, unless that has not helped before."""
    state, blame = crash_loop.judge_group(state, step, f"{why}.")
    return endings.fail(state, blame, now) if blame else _form_again(state, why, now)


def _form_again(state: State, why: str, now: float) -> tuple[State, list[Action]]:
    state, starts = losses.recall(replace(state, why=why, broken=state.broken + 1, deadline=None))
    state = replace(state, phase="gathering", since=now)
    return (state, starts) if starts else _advance(state, now)


def _restarted(state: State, now: float) -> tuple[State, list[Action]]:
    """Do again what the lost master may not have done."""
    if state.phase in ("releasing", "ending"):
        kill: list[Action] = [KillAll()] if state.phase == "ending" else []
        return replace(state, deadline=now + endings.EXIT_S), kill
    hung = {n for n, member in state.members.items() if member.hung}
    kills = [Kill(worker) for worker in sorted(hung | state.those(KILLED))]
    again: list[Action] = [*_starts(state), *kills]
    actions: list[Action] = []
    if state.phase == "gathering":
        state, actions = _advance(state, now)
    elif not state.complete and state.recovers:
        why = "the master was lost while the group was forming"
        state, actions = _form_again(state, why, now)
    elif any(state.member(n).phase is Phase.LEFT for n in state.group):
        state = replace(state, deadline=now + MEETING_S)
    return state, [*again, *actions]


def _reminders(state: State, worker: int, generation: int) -> list[Action]:
    """What a member may have missed while it had no connection."""
    member, sends = state.member(worker), list[Action]()
    if member.phase is Phase.ABSENT:
        return []
    training = state.phase == "training" and worker in state.group
    if training and generation < state.generation:
        sends.append(Send(worker, _form(state, worker)))
    if state.stop:
        sends.append(Send(worker, stops.stop(state)))
    if state.changing and worker in state.group:
        sends.append(Send(worker, Regroup(generation=state.generation)))
    if state.phase == "releasing" or member.phase is Phase.RELEASED:
        sends.append(Send(worker, Release()))
    return sends


# ---- who is wanted


def _starts(state: State) -> list[Action]:
    if state.phase not in ("gathering", "training"):
        return []
    return [Start(worker) for worker in sorted(state.needed - state.joined)]


def refuse_scale(state: State, job: JobSpec, workers: int) -> str:
    """Why a run cannot have so many workers; empty if it can."""
    portions, most = job.per_commit.micro_batches, job.most_workers
    if wrong := job.mesh.refusal(workers):
        return wrong
    if not 1 <= workers <= most:
        return (
            f"workers = {workers}: a run needs 1 or more, and this one has work for {most} at "
            f"most, since {job.portions} = {portions}."
        )
    if not state.recovers or state.together:
        return "the workers of this run cannot change: it computes on GPUs."
    if not state.course:
        return "its workers are still getting ready. Try again in a moment."
    if state.phase not in ("gathering", "training") or state.stop:
        return "the run is about to end."
    return ""


def _scaled(state: State, scaled: Scaled, now: float) -> tuple[State, list[Action]]:
    workers, first = scaled.workers, frozenset().union(*map(state.fellows, scaled.first))
    before = sorted(state.wanted - state.servers, key=lambda n: (n in first, n))
    if state.phase not in ("gathering", "training") or workers == len(before):
        return state, []
    why = f"scaled from {len(before)} to {workers} workers"
    fields: dict[str, Any] = {"before": len(before), "workers": workers}
    if scaled.hosts:
        fields["hosts"] = list(scaled.hosts)
    log = Log("scaled", fields)
    return _want(state, _unused(state, workers - len(before)), before[workers:], why, log, now)


def _noticed(state: State, worker: int, now: float) -> tuple[State, list[Action]]:
    if worker not in state.wanted or state.phase not in ("gathering", "training"):
        return state, []
    if not state.recovers or state.together:
        return state, []  # it stays as long as it can
    if worker in state.servers:
        return state, []  # it too: what it holds stays in the memory of its host, for its number
    fellows, more = sorted(state.fellows(worker)), _unused(state, state.ranks)
    successor = more[fellows.index(worker)]
    why = f"worker {worker} was asked to leave; worker {successor} takes its place"
    fields: dict[str, Any] = {"worker": worker, "successor": successor}
    if others := [n for n in fellows if n != worker]:
        fields["fellows"] = others
    return _want(state, more, fellows, why, Log("worker_leaving", fields), now)


def _want(
    state: State,
    more: list[int],
    less: list[int],
    why: str,
    log: Log,
    now: float,
) -> tuple[State, list[Action]]:
    unchanged = state.phase == "training" and set(state.group) == state.wanted
    state = replace(state, why=why, since=now if unchanged else state.since)
    for worker in more:
        state = state.note(worker, wanted=True)
    for worker in less:
        state = state.note(worker, wanted=False)
    state, actions = _advance(state, now)
    return state, [log, *[Start(worker) for worker in more], *actions]


def _unused(state: State, count: int) -> list[int]:
    """The numbers of the lowest replicas of which no member is there, or was in this generation."""
    ranks, taken = state.ranks, {n // state.ranks for n in [*state.members, *state.group]}
    free = [each for each in range(len(taken) + max(count, 0)) if each not in taken]
    numbers = [each * ranks + place for each in free for place in range(ranks)]
    return numbers[: max(count, 0)]


# ---- who is lost


def _ended(state: State, event: Ended, now: float) -> tuple[State, list[Action]]:
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
            return _advance(losses.lose(state, worker), now)
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
    state, actions = (state, []) if starts else _advance(state, now)
    return state, [log, *starts, *actions]


def _ended_with_fellow(state: State, worker: int, now: float) -> tuple[State, list[Action]]:
    """A process has ended that was killed because of a fellow, which is the cause."""
    state = state.move(worker, Phase.ABSENT)
    if worker in state.needed:
        return state, [Start(worker)]
    return _advance(state, now)


def _hung(state: State, event: Hung) -> tuple[State, list[Action]]:
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


def _silent(state: State, event: Silent, now: float) -> tuple[State, list[Action]]:
    going_on = state.phase in ("gathering", "training")
    if event.worker not in state.living or state.recovers or not going_on:
        return state, []
    failure = endings.failed("silent", event.cause, event.step, event.phase)
    return endings.fail(state, Blame(event.worker, failure), now)


# ---- last messages


def _last_message(
    state: State, worker: int, message: Done | Failed, now: float
) -> tuple[State, list[Action]]:
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


# ---- time


def _tick(state: State, step: int, now: float) -> tuple[State, list[Action]]:
    state, asked = stops.check_time(state, step, now)
    if asked:
        return state, asked
    if state.deadline is None and state.phase in ("gathering", "training"):
        state, actions = _advance(state, now) if state.phase == "gathering" else (state, [])
        if now < max(state.since, state.came) + WAITING_S:
            return state, actions
        state, waits = _say_who_waits(state)
        return state, [*actions, *waits]
    if state.deadline is None or now < state.deadline:
        return state, []
    if state.phase in ("releasing", "ending"):
        ended, finish = endings.finish(state)
        return ended, [KillAll(), *finish]
    if state.suspect is not None:
        return endings.fail(state, state.suspect, now)
    return _came_apart(state, step, "the group came apart, and every process is alive", now)
