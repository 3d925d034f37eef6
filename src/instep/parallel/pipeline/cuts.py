"""Where to cut a chain of blocks, so that the slowest stage is as quick as possible.

Pure functions of measured times. How they are measured is in `measure.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise


def slowest(times: Sequence[float], cuts: Sequence[int]) -> float:
    """Seconds of the slowest stage."""
    return max(sum(times[a:b]) for a, b in pairwise([0, *cuts, len(times)]))


def best_cuts(
    times: Sequence[float],
    stages: int,
    banned: Collection[int] = (),
) -> tuple[int, ...] | None:
    """The cuts whose slowest stage is quickest; of several such, the first in order.

    Args:
        times: [blocks] seconds of each block's forward and backward pass; all 1 gives stages of
            equal numbers of blocks.
        stages: from 1.
        banned: blocks in front of which there must be no cut.

    Returns:
        [stages - 1] the first block of each stage but the first, rising; None if there are too
        few places to cut.
    """
    blocks = len(times)
    until = [0.0]
    for time in times:
        until.append(until[-1] + time)
    # best[b]: the slowest stage if the blocks before b are cut into so many stages, and the cuts
    best: list[tuple[float, tuple[int, ...]] | None]
    best = [None, *((until[b], ()) for b in range(1, blocks + 1))]
    for _ in range(stages - 1):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (blocks + 1)
        for b in range(1, blocks + 1):
            choices = [
                (max(before[0], until[b] - until[a]), (*before[1], a))
                for a in range(1, b)
                if a not in banned and (before := best[a]) is not None
            ]
            following[b] = min(choices, default=None)
        best = following
    found = best[blocks]
    return None if found is None else found[1]
