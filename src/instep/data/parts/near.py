"""Which worker computes which micro-batches, where each has some of the parts of a dataset.

A micro-batch is dealt to a worker that has its part. Where speeds have been measured, the worker
that is done last lends to others, as long as that makes the step shorter by enough. Pure
arithmetic: what a micro-batch holds never depends on it. Way in: `deal_near`.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 0.05
"""The share of a step's time lending one micro-batch must save: it crosses the network."""

Held = Sequence[Sequence[int]]
"""[workers][parts]: how many samples of a part a worker's host has."""


def holders(held: Held, part: int) -> list[int]:
    """The workers that have as much of a part as anybody has; all, where nobody has any."""
    most = max(each[part] for each in held)
    return [worker for worker, each in enumerate(held) if each[part] == most]


def deal_near(
    parts: Sequence[int],
    held: Held,
    speeds: Sequence[float] | None = None,
    *,
    lends: bool = True,
) -> list[list[int]]:
    """Assign micro-batches to workers that have their samples.

    Args:
        parts: of each micro-batch, the part that it draws from.
        held: of each worker, 1 or more.
        speeds: micro-batches per second of each worker, above 0; only their ratios count. Without
            them, nobody lends.
        lends: whether a worker may compute what it does not have.

    Returns:
        For each worker the numbers of its micro-batches, ascending; each is in one list. Those
        that several have go to whoever of them is done first.
    """
    by_part = {part: holders(held, part) for part in set(parts)}
    speed = [1.0] * len(held) if speeds is None else list(speeds)
    dealt: list[list[int]] = [[] for _ in held]

    def seconds(worker: int, more: int = 0) -> float:
        return (len(dealt[worker]) + more) / speed[worker]

    for number in sorted(range(len(parts)), key=lambda n: (len(by_part[parts[n]]), n)):
        able = by_part[parts[number]]
        dealt[min(able, key=lambda worker: (seconds(worker, 1), worker))].append(number)
    while lends and speeds is not None:
        last = max(range(len(held)), key=lambda worker: (seconds(worker), -worker))
        first = min(range(len(held)), key=lambda worker: (seconds(worker, 1), worker))
        if not dealt[last] or seconds(first, 1) >= (1 - LEAST) * seconds(last):
            break
        dealt[first].append(dealt[last].pop())
    return [sorted(numbers) for numbers in dealt]
