"""Which micro-batches are computed a second time, by which rank, and which rank is then wrong.

Pure arithmetic, with the same result on every worker: the repetitions follow from the number of
the step, and the verdict from digests that all workers have. How digests are computed is not
known here. Ranks are those of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

STATE_EVERY = 10
"""Steps from one comparison of the whole state to the next."""

PASSES_FOR_ONE = 75
"""A worker runs at least so many passes of its own for each pass that repeats another's."""


class Repeat(NamedTuple):
    """One micro-batch that is computed twice."""

    owner: int
    """The rank that it was assigned to."""
    number: int
    """Of the micro-batch, in its step."""
    second: int
    """The rank that repeats it."""


def repeats_every(micro_batches: int, workers: int) -> int:
    """Steps from one repetition to the next: 10, or a multiple if that would cost too much.

    All workers repeat one micro-batch in the same step, so such a step is longer by one pass, at
    any number of workers.

    Args:
        micro_batches: of a whole step.
        workers: in the group.
    """
    passes = max(1, micro_batches // workers)
    return STATE_EVERY * -(-PASSES_FOR_ONE // (passes * STATE_EVERY))


def repeats_of(step: int, every: int, dealt: Sequence[range]) -> list[Repeat]:
    """The micro-batches that are repeated in a step; none in most.

    Over time all micro-batches of each worker are repeated, by each of the others.

    Args:
        step: its number.
        every: as `repeats_every` gives it.
        dealt: for each rank, the numbers of its micro-batches in this step.

    Returns:
        One for each rank that has micro-batches, each repeated by another rank.
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


class WrongRanks(NamedTuple):
    """Which ranks are wrong."""

    named: tuple[int, ...] = ()
    """Known to be wrong."""
    suspects: tuple[int, ...] = ()
    """One of them is wrong, it is not known which; empty if a rank is named."""
    how: str = ""
    """The evidence, as the end of a sentence."""


def by_majority(values: Sequence[Hashable]) -> WrongRanks:
    """The ranks that differ from the majority; without a majority, all ranks are suspects.

    Args:
        values: of each rank; not all are equal.
    """
    (most, count), *_ = Counter(values).most_common(1)
    ranks = range(len(values))
    if 2 * count <= len(values):
        return WrongRanks(suspects=tuple(ranks), how="there is no majority")
    odd = tuple(rank for rank in ranks if values[rank] != most)
    return WrongRanks(odd, how=f"{count} of {len(values)} workers have another")


class Recomputed(NamedTuple):
    """The results of one rank that computed a disputed micro-batch again."""

    first: int
    second: int
    """Digests of the gradient, computed twice."""
    nothing: bool
    """Whether the gradient was zero when the loss was multiplied by 0."""


def by_trial(
    repeat: Repeat, before: Mapping[int, int], trials: Sequence[Recomputed]
) -> WrongRanks | None:
    """Which rank is wrong about a micro-batch for which two ranks had different gradients.

    The first that applies: the rank whose results differ from its own earlier one; the rank that
    differs from the majority; the rank whose gradient is not zero with a loss of zero, which
    shows a stuck bit even with two ranks.

    Args:
        repeat: the micro-batch.
        before: the two different digests, by rank.
        trials: the new results of each rank.

    Returns:
        None if several ranks differ from their own earlier results: then the model is not
        deterministic.
    """
    answers = [{trial.first, trial.second} for trial in trials]
    for rank, digest in before.items():
        answers[rank].add(digest)
    unsteady = tuple(rank for rank, given in enumerate(answers) if len(given) > 1)
    if len(unsteady) > 1:
        return None
    if unsteady:
        return WrongRanks(unsteady, how="it computed it again and got another")
    found = [trial.first for trial in trials]
    if len(set(found)) > 1 and (verdict := by_majority(found)).named:
        return verdict
    stuck = tuple(rank for rank in before if not trials[rank].nothing)
    if len(stuck) == 1:
        return WrongRanks(stuck, how="it gives a gradient where there is no loss")
    pair = tuple(sorted((repeat.owner, repeat.second)))
    return WrongRanks(suspects=pair, how="each got its own result again")
