"""Parts of even size: of the dataset as it stands, or of a keyed permutation of it.

The folds of `blocks` are those of scikit-learn's `KFold`, those of `random` the same of the
shuffled dataset.
"""

from __future__ import annotations

from instep.data.order import Indices
from instep.data.splits.base import Request, Sides
from instep.data.splits.sides import check_folds, even_ends, permuted, places, share, sides_of


def blocks(request: Request, order: Indices | None = None) -> Sides:
    """Validate on neighbours: one fold after the other, or the end of the dataset.

    Args:
        request: needs no column.
        order: of the samples; that of the dataset if None.
    """
    samples = request.samples
    check_folds(request, samples, "sample", "the dataset")
    if request.folds:
        ends = [0, *even_ends(samples, request.folds)]
        first, stop = ends[request.fold], ends[request.fold + 1]
    else:
        first, stop = samples - share(samples, request), samples
    mask = places(samples, slice(first, stop) if order is None else order[first:stop])
    return sides_of(mask)


def random(request: Request) -> Sides:
    """Validate on samples that the seed chooses."""
    return blocks(request, permuted(request.samples, request.seed))
