"""A curve of any length in some hundred buckets: least, mean and most of the steps in each.

A bucket has 1, 2, 4, ... steps, and begins at a multiple of that. When there are too many, each two
neighbours become one, so that no step has to be read again and the memory does not grow. What is
not finite counts in no mean. Ways in: `Fold`, `PointsSoFar`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.store.run_files import Floats, Records

MOST = 512
"""Buckets of a curve at most; never less than half of it once there were so many steps."""

_MOST_NEW = 4096

_PLACES = {"points": 0.0, "known": 0.0, "total": 0.0, "low": np.inf, "high": -np.inf}
_EMPTY = {**_PLACES, "last": -1.0, "time": -np.inf}
_COLUMN = np.array([[empty] for empty in _EMPTY.values()])


TimesAt = Callable[[NDArray[np.int64]], Floats]


def _times_of(times: Floats | TimesAt, places: NDArray[np.int64], at: Any = None) -> Floats:
    places = places if at is None else places[at]
    return times(places) if callable(times) else times[places]


class Fold:
    """Takes points in any order of step, each once.

    Args:
        most: buckets, an even number.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self.width = most, 1
        rows = np.empty((len(_EMPTY), most))
        rows[:] = _COLUMN
        self._fill(rows)

    def _fill(self, rows: Floats) -> None:
        self._rows = rows
        self._table: dict[str, Floats] = dict(zip(_EMPTY, rows, strict=True))

    def copy(self) -> Fold:
        """Another one of the same points, which may get more."""
        twin = copy(self)
        twin._fill(self._rows.copy())
        return twin

    def add(self, steps: Records, values: Floats, times: Floats | TimesAt) -> None:
        """Add points.

        Args:
            steps: [points], 0 or more.
            values: [points]; those that are not finite leave a gap where a bucket has no other.
            times: [points], of which a bucket keeps that of its last step; or a function that gives
                them for some points.
        """
        if not len(steps):
            return
        newest = int(steps.max())
        while newest // self.width >= self._most:
            self._widen()
        if np.any(steps[1:] < steps[:-1]):
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
            times = partial(_times_of, times, order)
        index = steps // self.width
        begins = np.concatenate([[0], np.flatnonzero(np.diff(index)) + 1])
        at = index[begins]
        finite = np.isfinite(values)
        table = self._table
        table["points"][at] += np.diff(np.append(begins, len(steps)))
        table["known"][at] += np.add.reduceat(finite, begins, dtype=np.int64)
        table["total"][at] += np.add.reduceat(np.where(finite, values, 0.0), begins)
        lows = np.minimum.reduceat(np.where(finite, values, np.inf), begins)
        table["low"][at] = np.minimum(table["low"][at], lows)
        highs = np.maximum.reduceat(np.where(finite, values, -np.inf), begins)
        table["high"][at] = np.maximum(table["high"][at], highs)
        ends = np.append(begins[1:], len(steps)) - 1
        later = steps[ends] > table["last"][at]
        at, ends = at[later], ends[later]
        table["last"][at], table["time"][at] = steps[ends], _times_of(times, ends)

    def _widen(self) -> None:
        self.width *= 2
        second = self._table["points"][1::2] > 0
        for name, empty in _EMPTY.items():
            pairs = self._table[name].reshape(-1, 2)
            if name in ("points", "known", "total"):
                merged = pairs.sum(1)
            elif name != "time":
                merged = pairs.min(1) if name == "low" else pairs.max(1)
            else:  # the second of two, where there is one
                merged = np.where(second, pairs[:, 1], pairs[:, 0])
            self._table[name][: len(merged)] = merged
            self._table[name][len(merged) :] = empty

    @property
    def _there(self) -> NDArray[np.bool_]:
        return self._table["points"] > 0

    @property
    def step(self) -> Records:
        """The last step of each bucket that has one, [buckets] int64."""
        return self._table["last"][self._there].astype(np.int64)

    @property
    def time(self) -> Floats:
        """The time of that step, [buckets]."""
        return self._table["time"][self._there]

    @property
    def total(self) -> Floats:
        """The sum of the finite values of each, [buckets]."""
        return self._table["total"][self._there]

    def curve(self) -> dict[str, Any]:
        """`mean`, and `low` and `high` if a bucket has several points; NaN where none is finite."""
        there = self._there
        known, total = self._table["known"][there], self._table["total"][there]
        gaps = known == 0
        found = {"mean": np.where(gaps, np.nan, total / np.maximum(known, 1))}
        if self.width > 1:
            for name in ("low", "high"):
                found[name] = np.where(gaps, np.nan, self._table[name][there])
        return found


class PointsSoFar:
    """Takes points one by one, and folds many at once."""

    def __init__(self) -> None:
        self._fold = Fold()
        self._new: list[tuple[int, float, float]] = []

    def add(self, step: int, value: float, time: float) -> None:
        """Add a point; a step has one."""
        self._new.append((step, value, time))
        if len(self._new) > _MOST_NEW:
            self.fold()

    def fold(self) -> Fold:
        """All so far."""
        if self._new:
            steps, values, times = zip(*self._new, strict=True)
            self._fold.add(np.array(steps, np.int64), np.array(values), np.array(times))
            self._new.clear()
        return self._fold
