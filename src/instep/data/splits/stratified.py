"""Each class on both sides in its proportion.

Over folds, each has as many samples of each class as a fold of scikit-learn's `StratifiedKFold`;
which ones, the seed decides.
"""

from __future__ import annotations

import numpy as np

from instep.data.order import Indices
from instep.data.splits.base import Request, Sides
from instep.data.splits.columns import Classes, Column
from instep.data.splits.sides import permuted, share, sides_of
from instep.errors import DataError
from instep.words import plural


def stratified(request: Request) -> Sides:
    """Validate on the same share of each class, rounded; training has at least one of each."""
    assert request.labels is not None, "a class for each sample"
    classes = Classes.of(request.labels, request.samples)
    check_classes(request, request.labels, classes)
    taken = _of_folds(request, classes) if request.folds else _of_share(request, classes)
    validated = np.zeros(request.samples, np.bool_)
    by_class = np.argsort(classes.codes, kind="stable")
    for code, members in enumerate(np.split(by_class, np.cumsum(classes.counts)[:-1])):
        order = permuted(len(members), request.seed, code)
        before = int(taken[: request.fold, code].sum())
        validated[members[order[before : before + int(taken[request.fold, code])]]] = True
    return sides_of(validated)


def check_classes(request: Request, labels: Column, classes: Classes) -> None:
    """Refuse a class that cannot be on both sides, or in each fold.

    Raises:
        DataError: names the smallest.
    """
    counts, least = classes.counts, request.folds or 2
    smallest = int(counts.argmin())
    if counts[smallest] < least:
        wanted = f"data.folds = {least}: each fold" if request.folds else "each of the two sides"
        remedy = " or fewer data.folds," if request.folds and counts[smallest] > 1 else ""
        raise DataError(
            f"the class {classes.shown(smallest)} of {labels.name} has "
            f"{plural(int(counts[smallest]), 'sample')}, and {wanted} needs one of each class. "
            f"Leave the class out, join it with another,{remedy} or set data.split = 'random'."
        )


def _of_folds(request: Request, classes: Classes) -> Indices:
    """Samples of each class in each fold, [folds, classes]: dealt in turn, class after class."""
    ordered, count = np.sort(classes.codes), len(classes.names)
    turns = [ordered[number :: request.folds] for number in range(request.folds)]
    dealt: Indices = np.stack([np.bincount(each, minlength=count) for each in turns])
    return dealt


def _of_share(request: Request, classes: Classes) -> Indices:
    """Samples of each class, [1, classes]: rounded down, and the largest rests rounded up."""
    exact = classes.counts * request.validation
    taken: Indices = np.floor(exact).astype(np.int64)
    missing = share(request.samples, request) - int(taken.sum())
    with_room = taken + 1 < classes.counts
    largest = np.argsort(np.where(with_room, taken - exact, 1.0), kind="stable")
    taken[largest[: min(missing, int(with_room.sum()))]] += 1
    return np.stack([taken])
