"""Does an order mix the classes of a dataset? Measured on labels alone, before anything is trained.

A stretch of positions as long as a window is where batches draw from at a time. How much it says
about a sample's class is the mutual information of stretch and class: 0 where every stretch has the
classes of the whole set, all of the classes' entropy where each has one class. So many positions of
the global order tell a little too, as they are few; the difference is what the windowed order
adds. It knows no datasets. Way in: `mixing`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.data.order import AnyOrder, Indices, Order

STRETCHES = 16
"""Windows that are looked at, evenly over the first epoch."""

Counts = np.ndarray[Any, np.dtype[np.int64]]


class Mixing(NamedTuple):
    """Classes in a window, as the number of equally large ones that have the same entropy."""

    here: float
    """In a window of the order."""
    shuffled: float
    """In so many samples of the global order."""
    told: float
    """Share of the classes' entropy that a window tells, above what it does in the global order."""
    clear: bool
    """Whether that is beyond chance: `2 * samples * information` has a chi-square distribution
    where a window tells nothing, and then its deviation is the root of twice its mean."""

    @property
    def poor(self) -> bool:
        """Whether classes come one after the other: a window tells more than a tenth."""
        return self.told > 0.1 and self.clear


def mixing(
    order: AnyOrder,
    samples: int,
    seed: int,
    window: int,
    classes: Callable[[Indices], Sequence[Hashable]],
    *,
    each: int = 1024,
) -> Mixing | None:
    """Compare an order's classes with those of the global order.

    Args:
        order: that of the job.
        samples: in the dataset.
        seed: of the job.
        window: positions that the order mixes.
        classes: of samples, by their indices.
        each: labels to read of each window, `2 * STRETCHES * each` in all.

    Returns:
        None where there is one window or one class.
    """
    windows = samples // window
    if windows < 2:
        return None
    numbers = np.unique(np.arange(STRETCHES) * windows // STRETCHES)
    read = [
        [classes(which.indices(0, n * window, n * window + min(window, each))) for n in numbers]
        for which in (order, Order(samples, seed))
    ]
    known: dict[Hashable, int] = {}
    for values in (value for rows in read for row in rows for value in row):
        known.setdefault(values, len(known))
    if len(known) < 2:
        return None
    tables = [np.array([_counts(row, known) for row in rows]) for rows in read]
    means = [float(np.mean([_entropy(row) for row in table])) for table in tables]
    told = [_entropy(table.sum(0)) - mean for table, mean in zip(tables, means, strict=True)]
    more, twice = told[0] - told[1], 2 * tables[0].sum()
    return Mixing(
        here=float(np.exp(means[0])),
        shuffled=float(np.exp(means[1])),
        told=more / _entropy((tables[0] + tables[1]).sum(0)),
        clear=bool(twice * more > 10 * (twice * told[1]) ** 0.5),
    )


def _counts(values: Sequence[Hashable], known: dict[Hashable, int]) -> Counts:
    return np.bincount([known[value] for value in values], minlength=len(known))


def _entropy(counts: Counts) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
