"""How long samples are: the sizes that differ from sample to sample, and a histogram of them.

Of each array the size of every dim, of text and bytes the bytes, of a list the elements. Ways in:
`PartLengths`, `sizes_of`, `lengths_of`; `edges_of` for other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instep.report.figures.sample import fields_of, shape_of

MOST_BINS, _SKEWED = 40, 12
"""Bars of a histogram; beyond so many times the median it is logarithmic, as an axis of a curve."""

Sizes = NDArray[np.int64]


class PartLengths(NamedTuple):
    """Sizes of one part of some samples."""

    name: str
    """Name of the part; and which dim, if it is not the first."""
    values: Sizes
    """[samples], one or more."""

    def as_table(self) -> dict[str, Any]:
        """For `--json`; the deviation is that of the population, as in a manifest."""
        values = self.values
        return {
            "samples": len(values),
            "mean": float(values.mean()),
            "deviation": float(values.std()),
            "least": int(values.min()),
            "largest": int(values.max()),
        }


def histogram_of(values: Sizes) -> tuple[Sizes, Sizes]:
    """How many values are in each bin, and the bins: [bins], [bins + 1].

    Bin k has the values from edge k to below edge k + 1. Edges are whole numbers, in equal steps
    unless the largest value is far above the median: then in about equal ratios.

    Args:
        values: [values], one or more, 0 or above.
    """
    edges = edges_of(int(values.min()), int(values.max()), float(np.median(values)), MOST_BINS)
    return np.histogram(values, edges)[0].astype(np.int64), edges


def edges_of(least: int, largest: int, median: float, most: int) -> Sizes:
    """Edges of at most so many bins, [bins + 1]: see `histogram_of`; below 0 in equal steps."""
    stop = largest + 1
    if least >= 0 and largest > _SKEWED * max(1.0, median):
        ratios = np.geomspace(max(least, 1), stop, most + 1).round().astype(np.int64)
        return np.unique(np.concatenate([[least], ratios[1:-1], [stop]]))
    step = -(-(stop - least) // most)
    return np.arange(least, stop + step, step, dtype=np.int64)


def sizes_of(sample: Any) -> dict[str, int]:
    """The sizes of one sample, by name of the part."""
    return dict(_sizes(fields_of(sample), ""))


def _sizes(parts: Mapping[str, Any], of: str) -> Iterable[tuple[str, int]]:
    for key, value in parts.items():
        name = f"{of}{key}"
        if (shape := shape_of(value)) is not None:
            yield from (
                (f"{name}, dim {at}" if at else name, size) for at, size in enumerate(shape)
            )
        elif isinstance(value, str):
            yield name, len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray | list):
            yield name, len(value)
        elif isinstance(value, Mapping | tuple):
            yield from _sizes(fields_of(value), f"{name}.")


def lengths_of(each: Iterable[Mapping[str, int]]) -> list[PartLengths]:
    """The sizes that differ among some samples, of those that have them."""
    found: dict[str, list[int]] = {}
    for sizes in each:
        for name, size in sizes.items():
            found.setdefault(name, []).append(size)
    return [
        PartLengths(name, np.array(sizes, np.int64))
        for name, sizes in found.items()
        if len(set(sizes)) > 1
    ]
