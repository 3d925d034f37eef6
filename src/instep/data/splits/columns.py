"""Columns that splits go by: classes and groups become codes, times become numbers.

A value that is missing (NaN, NaT, None) is on no side, so it is refused, with its sample.
Ways in: `Column`, `Classes.of`, `Times.of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from math import floor
from typing import Any, NamedTuple, NoReturn

import numpy as np

from instep.data.order import Indices
from instep.errors import DataError
from instep.units import seconds_in

Array = np.ndarray[Any, np.dtype[Any]]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SHOWN = 40
"""Letters of a value in a message."""


class Column(NamedTuple):
    """A value for each sample."""

    name: str
    """For messages, such as `Recipe.labels`."""
    values: Sequence[Any] | Array

    def checked(self, samples: int) -> Sequence[Any] | Array:
        """The values, one for each of so many samples.

        Raises:
            DataError: there are more or fewer, or they are no single values.
        """
        if len(self.values) != samples:
            raise DataError(
                f"{self.name} has {len(self.values):,} values, and the dataset has {samples:,} "
                "samples: one for each is wanted, in their order."
            )
        if isinstance(self.values, np.ndarray) and self.values.ndim != 1:
            raise DataError(
                f"{self.name} has the shape {list(self.values.shape)}: one value for each sample "
                "is wanted, not several."
            )
        return self.values

    def missing(self, sample: int, what: str = "no value") -> NoReturn:
        """Refuse a column for one of its values."""
        raise DataError(
            f"{self.name} has {what} for sample {sample}: a split needs one for each. Give it one, "
            "or leave the sample out of the dataset."
        )


class Classes(NamedTuple):
    """Values that repeat, numbered in the order in which they appear."""

    codes: Indices
    """[samples], from 0."""
    names: Sequence[Any] | Array
    """The value of each code."""

    @classmethod
    def of(cls, column: Column, samples: int) -> Classes:
        """Those of a column.

        Raises:
            DataError: a value is missing, or there is not one for each sample.
        """
        values = column.checked(samples)
        if not isinstance(values, np.ndarray) or values.dtype.hasobject:
            return cls._listed(column, values)
        if len(absent := np.flatnonzero(_is_missing(values))):
            column.missing(int(absent[0]))
        _, first, codes = np.unique(values, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return cls(rank[codes], values[np.sort(first)])

    @classmethod
    def _listed(cls, column: Column, values: Sequence[Any] | Array) -> Classes:
        known: dict[Any, int] = {}
        codes = np.empty(len(values), np.int64)
        for sample, value in enumerate(values):
            if value is None or value != value:
                column.missing(sample)
            try:
                codes[sample] = known.setdefault(value, len(known))
            except TypeError:
                column.missing(
                    sample,
                    f"the value {str(value)[:_SHOWN]!r}, which cannot be told "
                    "from others (it has no hash),",
                )
        return cls(codes, list(known))

    @property
    def counts(self) -> Indices:
        """Samples of each."""
        return np.bincount(self.codes, minlength=len(self.names)).astype(np.int64)

    def shown(self, code: int) -> str:
        """A value, for messages."""
        value = self.names[code]
        return repr(value.item() if isinstance(value, np.generic) else value)[:_SHOWN]


class Times(NamedTuple):
    """When each sample was: numbers in the column's own unit, or parts of a second for dates."""

    values: Array
    """[samples], int64 or float64."""
    per_second: int
    """How many of the unit make a second; 0 where only the user knows the unit."""

    @classmethod
    def of(cls, column: Column, samples: int) -> Times:
        """Those of a column of numbers, dates, or dates as ISO 8601 text. A date without a time
        zone is one of UTC.

        Raises:
            DataError: a value is missing, or is no time.
        """
        values = column.checked(samples)
        if not isinstance(values, np.ndarray) or values.dtype.kind in "OUSV":
            plain = [each.item() if isinstance(each, np.generic) else each for each in values]
            if not all(isinstance(each, int | float) for each in plain):
                return cls(_microseconds(column, plain), 10**6)
            values = np.asarray(plain)
        if len(absent := np.flatnonzero(_is_missing(values))):
            column.missing(int(absent[0]))
        if values.dtype.kind == "M":
            unit = "ns" if "ns" in values.dtype.str else "us"
            return cls(
                values.astype(f"datetime64[{unit}]").astype(np.int64),
                10**9 if unit == "ns" else 10**6,
            )
        if values.dtype.kind == "f" and len(endless := np.flatnonzero(~np.isfinite(values))):
            column.missing(int(endless[0]), "no finite time")
        if values.dtype.kind not in "iuf":
            column.missing(0, f"{str(values[0])[:_SHOWN]!r}, which is no time,")
        whole = values.dtype.kind in "iu" and int(values.max()) < 1 << 63
        return cls(values.astype(np.int64 if whole else np.float64), 0)

    def length(self, key: str, given: float | str) -> float:
        """A length of time in the unit of the values; a whole number where they are whole.

        Args:
            key: of the job, for messages.
            given: a number in the column's unit, of seconds where it holds dates; or a text.

        Raises:
            DataError: a text, and only the user knows the unit.
        """
        if isinstance(given, str):
            if not self.per_second:
                raise DataError(
                    f"{key} = {given!r}, and the times are plain numbers, of which only you know "
                    "the unit. Give a number in that unit."
                )
            given = seconds_in(given)
        length = given * self.per_second if self.per_second else given
        # between whole times, more than 2.5 is more than 2
        return floor(length) if self.values.dtype.kind == "i" else length


def _is_missing(values: Array) -> Array:
    if values.dtype.kind == "M":
        return np.isnat(values)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), np.bool_)


def _microseconds(column: Column, values: Sequence[Any]) -> Indices:
    """Dates as microseconds since 1970."""
    found = np.empty(len(values), np.int64)
    for sample, value in enumerate(values):
        if value is None or value != value:
            column.missing(sample)
        try:
            moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            moment = None
        if isinstance(moment, date) and not isinstance(moment, datetime):
            moment = datetime(moment.year, moment.month, moment.day)
        if not isinstance(moment, datetime):
            column.missing(
                sample,
                f"{str(value)[:_SHOWN]!r}, which is no time (a number, or a date such as "
                "2026-11-28T09:30:00Z),",
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        found[sample] = (moment - _EPOCH) // _MICROSECOND
    return found
