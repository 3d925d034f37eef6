"""Who computes which micro-batches of a step: a contiguous share for each worker.

Pure arithmetic. What a micro-batch holds is fixed by the job (`order.py`), so
dealing them differently never changes a global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite


def deal(micro_batches: int, workers: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Deal micro-batches to workers, evenly or by speed.

    Args:
        micro_batches: 0 or more.
        workers: 1 or more.
        speeds: samples per second of each worker, above 0; only their ratios
            count. Shares follow them by largest remainder.

    Returns:
        `workers` ranges of micro-batch numbers that follow each other and cover
        all. Without speeds their lengths differ by one at most. With
        `micro_batches >= workers` no range is empty.
    """
    if speeds is None:
        bounds = [micro_batches * number // workers for number in range(workers + 1)]
    else:
        assert len(speeds) == workers, f"{len(speeds)} speeds for {workers} workers"
        assert all(isfinite(speed) and speed > 0 for speed in speeds), f"speeds {speeds}"
        bounds = [0, *accumulate(_counts(micro_batches, speeds))]
    return [range(first, stop) for first, stop in pairwise(bounds)]


def _counts(micro_batches: int, speeds: Sequence[float]) -> list[int]:
    whole = sum(speeds)
    ideal = [micro_batches * speed / whole for speed in speeds]
    counts = [int(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: counts[i] - ideal[i])
    for worker in by_remainder[: micro_batches - sum(counts)]:
        counts[worker] += 1
    while 0 in counts and micro_batches >= len(counts):
        latest = max(
            (i for i, count in enumerate(counts) if count > 1), key=lambda i: counts[i] / speeds[i]
        )
        counts[latest] -= 1
        counts[counts.index(0)] += 1
    return counts
