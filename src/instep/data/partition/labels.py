"""Label imbalance: each class is cut into shares drawn from a Dirichlet distribution."""

from __future__ import annotations

import numpy as np

from instep.data.order import Indices, Order, key

_OF_CLASS = 11
"""What a key is drawn for: how a class is dealt."""


def labels(
    samples: int, participants: int, *, column: Indices | None, skew: float, seed: int
) -> list[Indices]:
    """Deal samples to participants with a chosen amount of label imbalance.

    Each class is cut into `participants` shares drawn from a symmetric Dirichlet, the usual
    stand-in for clients that differ (Hsu et al. 2019, arXiv:1909.06335). The shares follow from
    seed and class, so a validation set is dealt in the proportions of the training set.

    Args:
        samples: in the dataset.
        participants: how many parts to return.
        column: [samples] int64, the class of each sample.
        skew: Dirichlet concentration, above 0; 100 is near even, 0.1 severe.
        seed: the same seed gives the same parts on every machine.

    Returns:
        `participants` parts, [count] int64, ascending. Disjoint; together they hold every
        sample once. A count may be zero.
    """
    assert column is not None, "a class for each sample"
    owner = np.empty(samples, np.int64)
    for each in np.unique(column).tolist():
        own = key(seed, _OF_CLASS, each)
        proportions = np.random.default_rng(own).dirichlet(np.full(participants, skew))
        members = np.flatnonzero(column == each)
        ends = np.rint(proportions.cumsum() * len(members)).astype(np.int64)
        ends[-1] = len(members)
        shuffled = members[Order(len(members), own).indices(0, 0, len(members))]
        owner[shuffled] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return [np.flatnonzero(owner == number) for number in range(participants)]
