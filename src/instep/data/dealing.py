"""Which worker computes which micro-batches of a step: a contiguous range for each.

Pure arithmetic. The job fixes what a micro-batch holds (`order.py`), so another assignment
never changes a global batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isfinite


def deal(micro_batches: int, workers: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Assign micro-batches to workers, evenly or by speed.

    Args:
        micro_batches: 0 or more.
        workers: 1 or more.
        speeds: micro-batches per second of each worker, above 0; only their
            ratios count.

    Returns:
        `workers` ranges of micro-batch numbers that follow each other and cover
        all. Without speeds their lengths differ by one at most, and with
        `micro_batches >= workers` none is empty. With speeds, the last worker
        finishes as early as any assignment allows; a slow one may get nothing.
    """
    if speeds is None:
        bounds = [micro_batches * number // workers for number in range(workers + 1)]
    else:
        assert len(speeds) == workers, f"{len(speeds)} speeds for {workers} workers"
        assert all(isfinite(speed) and speed > 0 for speed in speeds), f"speeds {speeds}"
        bounds = [0, *accumulate(_counts(micro_batches, tuple(speeds)))]
    return [range(first, stop) for first, stop in pairwise(bounds)]


@lru_cache(maxsize=64)  # the same in most steps of a run
def _counts(micro_batches: int, speeds: tuple[float, ...]) -> list[int]:
    """First what all can do in the shortest possible time, then one each to the first to finish."""
    total = sum(speeds)
    counts = [int(micro_batches * speed / total) for speed in speeds]
    # with one more: finish time, count, worker; of two that finish at once, the smaller count
    next_ = [((n + 1) / speeds[i], n + 1, i) for i, n in enumerate(counts)]
    heapq.heapify(next_)
    for _ in range(micro_batches - sum(counts)):
        _, n, i = next_[0]
        counts[i] = n
        heapq.heapreplace(next_, ((n + 1) / speeds[i], n + 1, i))
    return counts
