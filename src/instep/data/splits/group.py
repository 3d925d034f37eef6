"""Whole groups on one side: of a patient, an author, a machine, all samples or none.

Folds are as large as those of scikit-learn's `GroupKFold`; which of equally large groups is where,
the seed decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from instep.data.order import Indices
from instep.data.splits.base import Request, Sides
from instep.data.splits.columns import Classes
from instep.data.splits.sides import Mask, check_folds, permuted, share, sides_of


def group(request: Request) -> Sides:
    """Validate on groups with about the share of all samples."""
    assert request.groups is not None, "a group for each sample"
    groups = Classes.of(request.groups, request.samples)
    check_folds(request, len(groups.names), "group", request.groups.name)
    order = permuted(len(groups.names), request.seed)
    counts = groups.counts
    if request.folds:
        chosen = _folds(counts, order, request.folds) == request.fold
    else:
        chosen = nearest(counts[:, None], [share(request.samples, request)], order)
    return sides_of(chosen[groups.codes])


def _folds(counts: Indices, order: Indices, folds: int) -> Indices:
    """The fold of each group: the largest ones first, each to the fold that has least."""
    largest = order[np.argsort(-counts[order], kind="stable")]
    loads = [(0, fold) for fold in range(folds)]
    where = np.empty(len(counts), np.int64)
    for each, size in zip(largest.tolist(), counts[largest].tolist(), strict=True):
        load, fold = loads[0]
        where[each] = fold
        heapq.heapreplace(loads, (load + size, fold))
    return where


def nearest(counts: Indices, wanted: Sequence[float], order: Indices) -> Mask:
    """Groups that together have about the wanted number of samples of each class.

    Each group in turn is taken if that brings the sum closer.

    Args:
        counts: [groups, classes] samples.
        wanted: of each class, above 0.
        order: in which groups are looked at.

    Returns:
        [groups] bool; at least one is taken, and at least one is not.
    """
    weights = 1.0 / np.square(np.asarray(wanted, np.float64))
    left = np.asarray(wanted, np.float64)
    chosen = np.zeros(len(counts), np.bool_)
    for each in order.tolist():
        after = left - counts[each]
        if np.dot(weights, after * after) < np.dot(weights, left * left):
            chosen[each], left = True, after
    totals = counts.sum(1)
    if not chosen.any():
        chosen[order[totals[order].argmin()]] = True
    if chosen.all():
        chosen[order[totals[order].argmin()]] = False
    return chosen
