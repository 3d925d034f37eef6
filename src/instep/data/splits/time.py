"""The past is trained on, and what came after it is validated on.

Cuts lie between different times, so that samples of one time stay together. Folds are those of
scikit-learn's `TimeSeriesSplit` where all times differ: each validates on the next part, and trains
on all before it. With `embargo` they are even parts of the whole time, and each trains on what is
later, too (purged folds: Lopez de Prado 2018, "Advances in Financial Machine Learning", 7.4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.order import Indices
from instep.data.splits.base import Request, Sides
from instep.data.splits.columns import Array, Times
from instep.data.splits.sides import Mask, even_ends, share, sides_of
from instep.errors import DataError
from instep.words import plural


def time(request: Request) -> Sides:
    """Validate on a stretch of time; no sample of it at or before the last training time + `gap`.

    With folds and `embargo`, training also has what comes after the stretch + `embargo`.
    """
    assert request.times is not None, "a time for each sample"
    times = Times.of(request.times, request.samples)
    values, gap = times.values, times.length("data.gap", request.gap)
    ordered = np.sort(values)
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    cuts = _moved(_cuts(request), begins, request, request.times.name)
    fold = request.fold if request.folds else 0
    first, last = ordered[cuts[fold]], ordered[cuts[fold + 1] - 1]
    validated = (values >= first) & (values <= last)
    trained = _before(values, first, gap)
    if request.embargo is not None:
        trained |= values > last + times.length("data.embargo", request.embargo)
    if not trained.any():
        raise DataError(
            f"data.gap = {request.gap!r} leaves nothing to train on: the validation side of fold "
            f"{fold} begins at {first}, and {request.times.name} begins at {ordered[0]}. Set a "
            "smaller gap, or fewer data.folds."
        )
    return sides_of(validated, trained)


def _before(values: Array, first: Any, gap: float) -> Mask:
    """Those that are earlier by more than `gap`."""
    whole = values.dtype.kind == "i"  # then of any size
    return np.asarray(values < int(first) - int(gap) if whole else values + gap < first)


def _cuts(request: Request) -> list[int]:
    """Where validation sides would begin in the order of time, and the last one end, if all times
    were different."""
    samples = request.samples
    if not request.folds:
        return [samples - share(samples, request), samples]
    if request.embargo is not None:
        return [0, *even_ends(samples, request.folds)]
    size = samples // (request.folds + 1)
    return [samples - (request.folds - number) * size for number in range(request.folds + 1)]


def _moved(cuts: list[int], begins: Indices, request: Request, name: str) -> list[int]:
    """Each cut at the nearest begin of a time, with at least one time between two of them.

    Raises:
        DataError: there are fewer times than parts.
    """
    inner = cuts[:-1] if cuts[0] else cuts[1:-1]  # cuts that lie between two times
    if len(begins) <= len(inner):
        few, remedy = "two sides need 2", "another data.split"
        if request.folds:
            few, remedy = f"data.folds = {request.folds} needs {len(inner) + 1}", "fewer data.folds"
        raise DataError(
            f"{name} has {plural(len(begins), 'different time')}, and {few}, as samples of one "
            f"time stay together. Set {remedy}."
        )
    places, before = list[int](), 0
    for number, cut in enumerate(inner):
        after = int(np.searchsorted(begins, cut))
        near = after if after < len(begins) else after - 1
        if near and cut - begins[near - 1] < begins[near] - cut:
            near -= 1
        before = min(max(near, before + 1), len(begins) - len(inner) + number)
        places.append(int(begins[before]))
    return [*([0] if not cuts[0] else []), *places, cuts[-1]]
