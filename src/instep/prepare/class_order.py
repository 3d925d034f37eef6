"""Notices columns whose equal values stand together, such as labels of a set sorted by class.

The windowed order mixes neighbours alone, so it would train on one class after the other. Looked at
are the counts of classes that each task has found; no sample is read. How far they tell what a
sample's class is, is their mutual information, as in `data/mixing.py`. Way in: `standing_together`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instep.data.shards.columns import Column
from instep.data.shards.views import Array
from instep.prepare.messages import Mapped

TOLD = 0.1
"""Share of the entropy of classes that a task tells, from which on they stand together."""

MOST_SHARE = 0.5
"""A column with more classes than this share of the samples of a task is none of classes."""


def standing_together(results: Sequence[Mapped], columns: Sequence[Column]) -> list[str]:
    """Name the columns whose classes differ more between tasks than chance has them.

    Args:
        results: of tasks, in the order of their samples.
        columns: of the samples.
    """
    with_samples = [result for result in results if result.samples]
    return [
        column.name
        for at, column in enumerate(columns)
        if _is_sorted([result.figures[at].classes for result in with_samples])
    ]


def _is_sorted(counted: Sequence[dict[str, int] | None]) -> bool:
    names = sorted({name for each in counted for name in each or ()})
    if len(counted) < 2 or len(names) < 2 or not all(counted):
        return False
    table = np.array([[(each or {}).get(name, 0) for name in names] for each in counted], float)
    samples = table.sum()
    if len(names) > MOST_SHARE * samples / len(table):
        return False
    whole = _entropy(table.sum(0, keepdims=True))
    told = float(whole[0] - (_entropy(table) * table.sum(1)).sum() / samples)
    # 2 * samples * information has a chi-square distribution where tasks tell nothing
    freedom = (len(table) - 1) * (len(names) - 1)
    clear = 2 * samples * told > freedom + 10 * (2 * freedom) ** 0.5
    return bool(clear and told - freedom / (2 * samples) > TOLD * whole[0])


def _entropy(counts: Array) -> Array:
    """The entropy of each row."""
    shares = counts / counts.sum(1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    found: Array = -(shares * logs).sum(1)
    return found
