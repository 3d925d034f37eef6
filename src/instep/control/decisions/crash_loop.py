"""When a worker that is lost again and again is not replaced any more, and what is to blame.

Counts losses by worker and by place (the sample that was read, or the step at which the
process's own code ended it), and the times that a group broke though its processes
live. A count starts again when more is committed than ever before; going back to a
checkpoint does not reset it. A part of the decisions in `decide.py`, and as pure.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import msgspec

from instep.comm.protocol.messages import Failed, Mark
from instep.control.decisions import endings
from instep.control.decisions.events import Ended
from instep.control.decisions.state import Blame, State
from instep.data.samples.last_read import describe_read, is_reading
from instep.data.samples.unreadable import MAX_CRASHES, SKIP_HINT
from instep.errors import DataError

MOST_LOSSES = 10
"""A worker that is lost so often while nothing more is committed is not replaced again."""

MOST_HANGS = 7
"""The same, for one that hangs; its timeout doubles each time."""

MOST_LOOPS = 2
"""The same, of reads that keep a processor busy: the second has half a minute."""

MOST_APART = 10
"""A group that breaks so often while all its processes live is not formed again."""

MOST_UNFORMED = 4
"""The same, of hosts whose workers have never formed a group: no network has parted them."""

CLOSED = (
    " Workers of several hosts connect to each other at ports that they choose: open all ports "
    "between the machines."
)

OUT_OF_SYSTEM = (
    " The system gives the process no more memory, threads or files: raise its limits "
    "(ulimit -a shows them), or use fewer workers."
)

_OWN = {-getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP")}
"""Exit codes of a process that its own code has ended; SIGKILL comes from outside."""

_STEP = "step"


def judge(state: State, event: Ended) -> tuple[State, Failed, bool]:
    """Count the loss of a worker that could be replaced.

    Returns:
        The state after it; the failure to report; and whether the run ends with it.
    """
    worker, hung = event.worker, state.member(event.worker).hung
    failure = endings.of(event.code, event.step, event.place)
    if hung:
        if is_reading(event.place):
            hung = f"{hung.rstrip('.')}, {describe_read(event.place)}."
        failure = endings.failed("hang", hung, event.step)
    counts = state.hangs if hung else state.lost
    before = counts.get(worker)
    new = not state.member(worker).formed and bool(state.holders - {worker})
    # what the others commit meanwhile is no progress of a process that does not get ready
    reached = before[0] if before and new else event.committed
    counts = counts | {worker: _once_more(before, reached)}
    counted = replace(state, hangs=counts) if hung else replace(state, lost=counts)
    counted, times = _at_place(counted, event)
    if hung and not event.step:  # all read the same samples then, and each may try again
        times = min(times, counts[worker][1])
    if times >= _most_at(state, event):
        if not is_reading(event.place):
            where = "at this step" if event.step else "before the first step"
            cause = f"{failure.cause} It happened {times} times {where}."
            return counted, endings.failed(failure.kind, cause, failure.step), True
        if not state.skips:
            cause = f"{failure.cause} It happened {times} times at this sample.{SKIP_HINT}"
            return counted, _unreadable(cause, event), True
        return _leave_out(counted, event, times), failure, False
    farthest, times = counts[worker]
    if times >= (MOST_HANGS if hung else MOST_LOSSES):
        so_far = "it was never ready" if new and event.committed else _no_more_than(farthest)
        cause = f"{failure.cause} It happened {times} times and {so_far}."
        return counted, endings.failed(failure.kind, cause, failure.step), True
    return counted, failure, False


def judge_group(state: State, committed: int, why: str = "") -> tuple[State, Blame | None]:
    """Count a group that came apart though every process lives.

    Hosts that a network may part are waited for: then a failure counts only if a worker says
    that it is the cause itself, or if there has never been a group.

    Args:
        state: the present one.
        committed: the last step that any worker has committed, as far as is known.
        why: what the master saw, for the case that no worker says more.

    Returns:
        The state after it; and who is to blame, where the run ends with it.
    """
    seen = state.seen
    mine = seen is not None and seen.mine
    before = any(member.formed for member in state.members.values())
    if state.parted and before and not mine:
        return state, None
    apart = _once_more(state.apart, committed)
    state, (farthest, times) = replace(state, apart=apart), apart
    if times < (MOST_UNFORMED if state.parted and not mine else MOST_APART):
        return state, None
    what = seen.cause if seen is not None and seen.cause else why or "no worker has said why."
    cause = f"{what.rstrip('.')}. The group came apart {times} times and {_no_more_than(farthest)}."
    if mine:
        cause += OUT_OF_SYSTEM
    elif state.parted:
        cause += CLOSED
    step = committed + 1 if committed else 0
    return state, Blame(seen.worker if seen else -1, endings.failed("group", cause, step))


def marks(state: State) -> list[Mark]:
    """Samples that workers leave out, or read with care."""
    places = [place.partition(" ") for place in state.places]
    suspected = [Mark(dataset=d, sample=int(sample)) for d, _, sample in places if d != _STEP]
    return [*state.left_out, *suspected]


def _no_more_than(step: int) -> str:
    return f"no step after {step} was committed" if step else "no step was committed"


def _place(event: Ended) -> str:
    """Where a process ended, where that may be the reason; else empty."""
    if is_reading(event.place):
        return f"{event.place.dataset} {event.place.sample}"
    return f"{_STEP} {event.step} {-event.code}" if event.code and event.code in _OWN else ""


def _at_place(state: State, event: Ended) -> tuple[State, int]:
    """Count the loss at its place; how often it happened there. Places passed are forgotten."""
    places = {at: count for at, count in state.places.items() if event.committed <= count[0]}
    hung = state.member(event.worker).hung
    place = _place(event) if not hung or is_reading(event.place) else ""
    if not place:
        return replace(state, places=places), 0
    counted = _once_more(places.get(place), event.committed)
    vague = is_reading(event.place) and (event.place.ahead or event.place.count > 1)
    if vague:  # it may have been another cause: the next loss there decides
        counted = counted[0], 1
    return replace(state, places=places | {place: counted}), counted[1]


def _once_more(before: tuple[int, int] | None, committed: int) -> tuple[int, int]:
    if before is None or committed > before[0]:
        return committed, 1
    return before[0], before[1] + 1


def _most_at(state: State, event: Ended) -> int:
    """How often it may happen at one place."""
    member = state.member(event.worker)
    if not member.hung:
        return MAX_CRASHES
    return MOST_LOOPS if member.loops else MOST_HANGS


def _unreadable(cause: str, event: Ended) -> Failed:
    assert event.place is not None
    phase = "validation" if event.place.dataset == "validation" else "loading"
    failure = endings.failed(DataError.__name__, cause, event.step)
    return msgspec.structs.replace(failure, phase=phase, exit_code=DataError.exit_code)


def _leave_out(state: State, event: Ended, times: int) -> State:
    """Have no worker read a sample again; losses because of it do not count for the rest."""
    place, member = event.place, state.member(event.worker)
    assert place is not None
    if member.hung:
        how = "kept its process busy without end" if member.loops else "hung its process"
    elif event.code is None:
        how = "ended its process by an unknown cause"
    else:
        by = endings.signal_name(event.code) if event.code < 0 else f"code {event.code}"
        how = f"ended its process by {by}"
    mark = Mark(dataset=place.dataset, sample=place.sample, cause=f"reading it {how} {times} times")
    return replace(
        state,
        left_out=(*state.left_out, mark),
        places={at: count for at, count in state.places.items() if at != _place(event)},
        lost={n: count for n, count in state.lost.items() if n != event.worker},
        hangs={n: count for n, count in state.hangs.items() if n != event.worker},
    )
