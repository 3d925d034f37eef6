"""What a sample of prepared data holds: the name, kind, type and shape of each column.

A column may be widened while more samples come (integers to floats, arrays of one length to
arrays of several), and in no other way. Nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

Kind = Literal["number", "array", "text", "bytes", "image"]

VARIES = -1
"""The length of an array's first dim, where samples differ in it."""


class Misfit(ValueError):
    """A value that its column cannot hold; the text says what it is, and what the column is."""


class Column(msgspec.Struct, frozen=True):
    """One column: a value of each sample."""

    name: str
    kind: Kind
    dtype: str = ""
    """Of a number, or of an array's elements, as numpy calls it: "int64", "float32", "bool"."""
    shape: tuple[int, ...] = ()
    """Of an array; `VARIES` is possible for the first dim."""
    is_time: bool = False
    """Whether the numbers are times: microseconds since 1970, of dates in the raw files."""

    @property
    def ragged(self) -> bool:
        """Whether samples differ in length: text, bytes, and arrays whose first dim varies."""
        return self.kind in ("text", "bytes", "image") or self.shape[:1] == (VARIES,)

    @property
    def element(self) -> np.dtype:
        """The type of one element; bytes of text and images."""
        return np.dtype(self.dtype or np.uint8)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of what a sample has one of, or several if `ragged`."""
        return self.shape[1:] if self.ragged else self.shape

    def __str__(self) -> str:
        if self.kind in ("text", "bytes", "image"):
            return self.kind
        if self.kind == "number":
            return self.dtype
        sizes = ", ".join("n" if size == VARIES else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


def as_plain(columns: Sequence[Column]) -> list[list[Any]]:
    """Columns as lists of JSON, for a schema and a digest."""
    return [[c.name, c.kind, c.dtype, list(c.shape), *[True] * c.is_time] for c in columns]


def converted(name: str, data: Any, element: np.dtype) -> Any:
    """The values of an array in the type of a column.

    Raises:
        Misfit: one of them is a whole number that no float of that type is.
    """
    found = data.astype(element, copy=False)
    if data.dtype.kind in "iu" and element.kind == "f":
        with np.errstate(invalid="ignore"):
            other = np.flatnonzero(found.astype(data.dtype) != data)
        if len(other):
            raise Misfit(
                f"column {name!r} has {data.ravel()[other[0]]}, which {element} cannot hold, and "
                "fractions elsewhere; wanted: whole numbers alone, or text"
            )
    return found


def widened(known: Column, found: Column) -> Column:
    """The column that can hold both.

    Raises:
        Misfit: there is none.
    """
    if known == found:
        return known
    if known.name != found.name:
        raise Misfit(f"column {found.name!r} stands where {known.name!r} is in the samples before")
    if known.kind == found.kind == "array" and known.shape[1:] == found.shape[1:]:
        same = known.shape == found.shape
        shape = known.shape if same else (VARIES, *known.shape[1:])
        if len(known.shape) == len(found.shape):
            return Column(known.name, "array", _wider(known, found), shape)
    if known.kind == found.kind == "number":
        return Column(known.name, "number", _wider(known, found))
    raise Misfit(f"column {known.name!r} is {found}, and {known} in the samples before")


def _wider(known: Column, found: Column) -> str:
    one, other = known.element, found.element
    if one == other:
        return one.name
    both = np.result_type(one, other)
    numbers = one.kind in "iuf" and other.kind in "iuf"
    exact = both.kind != "f" or "f" in (one.kind, other.kind)  # not int64 with uint64
    if not numbers or not exact:
        raise Misfit(f"column {known.name!r} is {found}, and {known} in the samples before")
    return both.name


def widened_all(known: Sequence[Column], found: Sequence[Column]) -> list[Column]:
    """The same for all columns of samples.

    Raises:
        Misfit: as `widened`, or there are others.
    """
    if len(known) != len(found):
        raise Misfit(f"there are {len(found)} columns, and {len(known)} in the samples before")
    return [widened(one, other) for one, other in zip(known, found, strict=True)]
