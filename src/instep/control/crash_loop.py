"""When a worker that is lost again and again is not worth another try, and what is to blame.

Counts how often workers were lost, by worker and by place: the sample that was
read, or the step that was computed where the process's own code ended it; and how
often groups came apart of which every process lives. A count begins anew when more
is committed than ever before; going back to a checkpoint does not. As `decide.py`, it
knows no clock, socket or process.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import msgspec

from instep.comm.messages import Failed, Mark
from instep.control import endings
from instep.control.news import Blame, Ended, State
from instep.data.samples.last_read import describe_read, is_reading
from instep.data.samples.unreadable import MAX_CRASHES, SKIP_HINT
from instep.errors import DataError

MOST_LOSSES = 10
"""A worker that is lost so often while nothing more is committed is not replaced again."""

MOST_HANGS = 7
"""The same, for one that hangs; each time it is given twice as long."""

MOST_LOOPS = 2
"""The same, of reads that keep a processor busy: the second has half a minute."""

MOST_APART = 10
"""A group that comes apart so often while every process lives is not formed again."""

OUT_OF_SYSTEM = (
    " The system gives the process no more memory, threads or files: raise its limits "
    "(ulimit -a shows them), or use fewer workers."
)

_OWN = {
    -int(number)
    for number in (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
    )
}
"""What code does to its own process; SIGKILL comes from outside."""


def judge(state: State, news: Ended) -> tuple[State, Failed, bool]:
    """Count the loss of a worker that could be replaced.

    Returns:
        What is known after it; what is to be said of it; and whether the run ends with that.
    """
    worker = news.worker
    word = endings.of(news.code, news.step, news.place)
    if (hung := state.hung.get(worker)) is not None:
        word = endings.failed("hang", _hang(hung, news), news.step)
    counts = state.lost if hung is None else state.hangs
    counts = counts | {worker: _once_more(counts.get(worker), news.committed)}
    counted = replace(state, lost=counts) if hung is None else replace(state, hangs=counts)
    counted, times = _at_place(counted, news)
    if hung is not None and not news.step:  # all read the same then, and each is tried again
        times = min(times, counts[worker][1])
    reads = is_reading(news.place)
    if times >= _most_at(state, news):
        if not reads:
            where = "at this step" if news.step else "before the first step"
            cause = f"{word.cause} It happened {times} times {where}."
            return counted, endings.failed(word.kind, cause, word.step), True
        if not state.skips:
            cause = f"{word.cause} It happened {times} times at this sample.{SKIP_HINT}"
            return counted, _unreadable(cause, news), True
        return _leave_out(counted, news, times), word, False
    farthest, times = counts[worker]
    if times >= (MOST_LOSSES if hung is None else MOST_HANGS):
        more = f"no step after {farthest} was committed" if farthest else "no step was committed"
        cause = f"{word.cause} It happened {times} times and {more}."
        return counted, endings.failed(word.kind, cause, word.step), True
    return counted, word, False


def judge_group(state: State, committed: int, why: str = "") -> tuple[State, Blame | None]:
    """Count a group that came apart though every process lives.

    Hosts that a network has parted are waited for: there only what a worker
    says of itself counts.

    Args:
        state: what is known.
        committed: the last step that any worker has committed, as far as is known.
        why: what the master saw, where no worker says more.

    Returns:
        What is known after it; and who is to blame, where the run ends with that.
    """
    seen = state.seen
    if state.parted and (seen is None or not seen.mine):
        return state, None
    state = replace(state, apart=_once_more(state.apart, committed))
    assert state.apart is not None
    farthest, times = state.apart
    if times < MOST_APART:
        return state, None
    more = f"no step after {farthest} was committed" if farthest else "no step was committed"
    what = seen.cause if seen is not None and seen.cause else why or "no worker has said why."
    cause = f"{what.rstrip('.')}. The group came apart {times} times and {more}."
    if seen is not None and seen.mine:
        cause += OUT_OF_SYSTEM
    step = committed + 1 if committed else 0
    return state, Blame(seen.worker if seen else -1, endings.failed("group", cause, step))


def marks(state: State) -> list[Mark]:
    """Samples that whoever reads is to leave out, or to be careful with."""
    suspected = []
    for place in state.places:
        dataset, _, sample = place.partition(" ")
        if dataset != _STEP:
            suspected.append(Mark(dataset=dataset, sample=int(sample)))
    return [*state.left_out, *suspected]


_STEP = "step"


def _place(news: Ended) -> str:
    """Where a process ended, where that may be the reason; empty where it says nothing."""
    if is_reading(news.place):
        return f"{news.place.dataset} {news.place.sample}"
    return f"{_STEP} {news.step} {-news.code}" if news.code in _OWN and news.code else ""


def _at_place(state: State, news: Ended) -> tuple[State, int]:
    """Count the loss at its place; how often it happened there. What was passed is forgotten."""
    places = {at: told for at, told in state.places.items() if news.committed <= told[0]}
    place = _place(news) if news.worker not in state.hung or is_reading(news.place) else ""
    if not place:
        return replace(state, places=places), 0
    counted = _once_more(places.get(place), news.committed)
    vague = is_reading(news.place) and (news.place.ahead or news.place.count > 1)
    if vague:  # it may have been something else: next time it is known
        counted = counted[0], 1
    return replace(state, places=places | {place: counted}), counted[1]


def _once_more(before: tuple[int, int] | None, committed: int) -> tuple[int, int]:
    if before is None or committed > before[0]:
        return committed, 1
    return before[0], before[1] + 1


def _most_at(state: State, news: Ended) -> int:
    """How often it may happen at one place."""
    if news.worker not in state.hung:
        return MAX_CRASHES
    return MOST_LOOPS if news.worker in state.loops else MOST_HANGS


def _hang(how: str, news: Ended) -> str:
    if not is_reading(news.place):
        return how
    return f"{how.rstrip('.')}, {describe_read(news.place)}."


def _unreadable(cause: str, news: Ended) -> Failed:
    assert news.place is not None
    phase = "validation" if news.place.dataset == "validation" else "loading"
    word = endings.failed(DataError.__name__, cause, news.step)
    return msgspec.structs.replace(word, phase=phase, exit_code=DataError.exit_code)


def _leave_out(state: State, news: Ended, times: int) -> State:
    """Have nobody read a sample again; what was lost for it says nothing of the rest."""
    place, worker = news.place, news.worker
    assert place is not None
    how = "kept its process busy without end"
    if worker not in state.hung:
        by = "an unseen cause"
        if news.code is not None:
            by = endings.signal_name(news.code) if news.code < 0 else f"code {news.code}"
        how = f"ended its process by {by}"
    elif worker not in state.loops:
        how = "hung its process"
    mark = Mark(dataset=place.dataset, sample=place.sample, cause=f"reading it {how} {times} times")
    places = {at: told for at, told in state.places.items() if at != _place(news)}
    lost = {n: told for n, told in state.lost.items() if n != worker}
    hangs = {n: told for n, told in state.hangs.items() if n != worker}
    return replace(state, left_out=(*state.left_out, mark), places=places, lost=lost, hangs=hangs)
