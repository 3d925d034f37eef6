"""What several splits need: sides of a mask, how large they are, and a keyed permutation."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from instep.data.order import Indices, Order, key
from instep.data.splits.base import Request, Sides
from instep.errors import DataError
from instep.words import plural

_OF_SPLIT = 21
"""What a key is drawn for: which samples are on which side."""

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def sides_of(validated: Mask, trained: Mask | None = None) -> Sides:
    """The sides of two masks over all samples; without the second, the rest is trained on.

    Raises:
        DataError: one of them is empty.
    """
    trained = ~validated if trained is None else trained
    sides = Sides(np.flatnonzero(trained), np.flatnonzero(validated))
    for name, side in zip(("training", "validation"), sides, strict=True):
        if not len(side):
            raise DataError(
                f"the split leaves the {name} side of {plural(len(validated), 'sample')} empty. "
                f"Set {'a larger' if name == 'validation' else 'a smaller'} data.validation, "
                "another data.fold, or another data.split."
            )
    return sides


def places(samples: int, chosen: Indices | slice) -> Mask:
    """A mask of so many samples that is true at the chosen ones."""
    mask = np.zeros(samples, np.bool_)
    mask[chosen] = True
    return mask


def permuted(samples: int, seed: int, *parts: int) -> Indices:
    """A keyed permutation of `0..samples-1`."""
    return Order(samples, key(seed, _OF_SPLIT, *parts)).indices(0, 0, samples)


def share(samples: int, request: Request) -> int:
    """Samples of the validation side, as `train_test_split` of scikit-learn rounds them."""
    return ceil(samples * request.validation)


def even_ends(samples: int, folds: int) -> list[int]:
    """Where each of so many even parts ends; the first ones have one sample more."""
    size, more = divmod(samples, folds)
    return [(number + 1) * size + min(number + 1, more) for number in range(folds)]


def check_folds(request: Request, count: int, what: str, where: str) -> None:
    """Refuse more folds than there is something for.

    Args:
        request: what is asked for; without folds, two sides are.
        count: how many of `what` there are.
        what: singular, such as `group`.
        where: what has them, as the beginning of a sentence.

    Raises:
        DataError: there are fewer.
    """
    least = request.folds or 2
    if count < least:
        few = "two sides need 2"
        if request.folds:
            few = f"data.folds = {request.folds} needs {request.folds}"
        remedy = f" Set data.folds to at most {count}." if request.folds and count > 1 else ""
        raise DataError(
            f"{where} has {plural(count, what)}, and {few}, so that none is empty.{remedy}"
        )
