"""Whole groups on one side, and each class in its proportion as far as that allows.

The folds are those of scikit-learn's `StratifiedGroupKFold`, whose rule this is; which of two
groups with the same spread of classes comes first, the seed decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.order import Indices
from instep.data.splits.base import Request, Sides
from instep.data.splits.columns import Classes
from instep.data.splits.group import nearest
from instep.data.splits.sides import check_folds, permuted, sides_of
from instep.data.splits.stratified import check_classes

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""Two spreads are equal if they differ by no more: those of `numpy.isclose`."""

Counts = np.ndarray[Any, np.dtype[np.float64]]


def stratified_group(request: Request) -> Sides:
    """Validate on groups with about the share of the samples of each class."""
    assert request.labels is not None, "a class for each sample"
    assert request.groups is not None, "a group for each sample"
    classes = Classes.of(request.labels, request.samples)
    groups = Classes.of(request.groups, request.samples)
    check_folds(request, len(groups.names), "group", request.groups.name)
    check_classes(request, request.labels, classes)
    width = len(classes.names)
    pairs = groups.codes * width + classes.codes
    counts = np.bincount(pairs, minlength=len(groups.names) * width).reshape(-1, width)
    order = permuted(len(groups.names), request.seed)
    if request.folds:
        chosen = folds_of(counts, order, request.folds) == request.fold
    else:
        chosen = nearest(counts, (request.validation * classes.counts).tolist(), order)
    return sides_of(chosen[groups.codes])


def folds_of(counts: Indices, order: Indices, folds: int) -> Indices:
    """The fold of each group: the most uneven ones first, each to the fold where all folds are then
    most alike, and of several such folds to the smallest.

    Args:
        counts: [groups, classes] samples.
        order: which of equally uneven groups come first.
        folds: 2 or more.
    """
    order = order[np.argsort(-np.std(counts[order].astype(np.float64), axis=1), kind="stable")]
    of_class = counts.sum(0)
    dealt: Counts = np.zeros((folds, counts.shape[1]))
    where = np.empty(len(counts), np.int64)
    diagonal = np.arange(folds)
    for each in order.tolist():
        tried = np.repeat(dealt[None], folds, axis=0)
        tried[diagonal, diagonal] += counts[each]
        spreads = np.std(tried / of_class, axis=1).mean(1).tolist()
        where[each] = fold = _best(spreads, dealt.sum(1).tolist())
        dealt[fold] += counts[each]
    return where


def _best(spreads: list[float], sizes: list[float]) -> int:
    best = 0
    for fold, (spread, size) in enumerate(zip(spreads, sizes, strict=True)):
        least = spreads[best]
        near = abs(spread - least) <= _ABSOLUTE + _RELATIVE * abs(least)
        if spread < least or (near and size < sizes[best]):
            best = fold
    return best
