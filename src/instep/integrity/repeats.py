"""Which micro-batches are computed a second time, by whom, and what follows where they differ.

Pure arithmetic, the same on every worker: who repeats what follows from the
step's number, who is found to be wrong from the digests that all have seen.
How a digest comes about, this file does not know. Ranks are those of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

STATE_EVERY = 10
"""Steps from one comparison of the whole state to the next."""

PASSES_FOR_ONE = 75
"""A worker runs at least so many passes of its own for each that it repeats."""


class Repeat(NamedTuple):
    """One micro-batch that is computed twice."""

    owner: int
    """The rank that it was dealt to."""
    number: int
    """Of the micro-batch, in its step."""
    second: int
    """The rank that computes it too."""


def repeats_every(micro_batches: int, workers: int) -> int:
    """Steps from one repetition to the next: 10, or a multiple where that would cost too much.

    Every worker repeats one micro-batch of another in the same step, so a step
    with repetitions is longer by one pass, however many workers there are.

    Args:
        micro_batches: of a whole step.
        workers: in the group.
    """
    passes = max(1, micro_batches // workers)
    return STATE_EVERY * -(-PASSES_FOR_ONE // (passes * STATE_EVERY))


def repeats_of(step: int, every: int, dealt: Sequence[range]) -> list[Repeat]:
    """What is computed twice in a step; nothing in most.

    Over time each worker's micro-batches are repeated in turn, by each of the others in turn.

    Args:
        step: its number.
        every: as `repeats_every` gives it.
        dealt: for each rank, the micro-batches that are its own in this step.

    Returns:
        One for each rank that has micro-batches, with another rank each.
    """
    size = len(dealt)
    if step % every or size == 1:
        return []
    turn = step // every
    away = 1 + turn % (size - 1)
    return [
        Repeat(owner, numbers[turn % len(numbers)], (owner - away) % size)
        for owner, numbers in enumerate(dealt)
        if numbers
    ]


class Verdict(NamedTuple):
    """Who is wrong."""

    named: tuple[int, ...] = ()
    """Found wrong."""
    suspects: tuple[int, ...] = ()
    """One of them is wrong, and it cannot be told which; empty where somebody is named."""
    how: str = ""
    """The evidence, as the end of a sentence."""


def by_majority(values: Sequence[Hashable]) -> Verdict:
    """Whoever has another value than more than half of all; all are suspects if there is no half.

    Args:
        values: of each rank; not all are equal.
    """
    (most, count), *_ = Counter(values).most_common(1)
    ranks = range(len(values))
    if 2 * count <= len(values):
        return Verdict(suspects=tuple(ranks), how="there is no majority")
    odd = tuple(rank for rank in ranks if values[rank] != most)
    return Verdict(odd, how=f"{count} of {len(values)} workers have another")


class Trial(NamedTuple):
    """What one rank answered when a disputed micro-batch was computed again."""

    first: int
    second: int
    """Digests of the gradient, computed twice."""
    nothing: bool
    """Whether the gradient of no loss at all was zero."""


def by_trial(repeat: Repeat, before: Mapping[int, int], trials: Sequence[Trial]) -> Verdict | None:
    """Who is wrong about a micro-batch for which two ranks had different gradients.

    In this order: who does not give its own answer again; who differs from most;
    who finds a gradient where there is no loss, which is how a stuck bit shows
    even to two.

    Args:
        repeat: the micro-batch.
        before: the digests over which they differed, by rank.
        trials: of each rank.

    Returns:
        None where several do not give their own answers again: then it is the
        model that does not.
    """
    answers = [{trial.first, trial.second} for trial in trials]
    for rank, digest in before.items():
        answers[rank].add(digest)
    unsteady = tuple(rank for rank, given in enumerate(answers) if len(given) > 1)
    if len(unsteady) > 1:
        return None
    if unsteady:
        return Verdict(unsteady, how="it computed it again and got another")
    found = [trial.first for trial in trials]
    if len(set(found)) > 1 and (verdict := by_majority(found)).named:
        return verdict
    stuck = tuple(rank for rank in before if not trials[rank].nothing)
    if len(stuck) == 1:
        return Verdict(stuck, how="it gives a gradient where there is no loss")
    pair = tuple(sorted((repeat.owner, repeat.second)))
    return Verdict(suspects=pair, how="each stands by what it computed")
