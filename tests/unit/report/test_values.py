"""Values of a column are drawn as classes only where they are classes."""

import numpy as np
import pytest

from instep.data.shards.columns import Column
from instep.report.figures.values import CountedValues

RNG = np.random.default_rng(2)


def values_of(numbers, kind="number"):
    names, counts = np.unique(numbers, return_counts=True)
    counted = {str(name): int(count) for name, count in zip(names, counts, strict=True)}
    return CountedValues(Column("c", kind, "" if kind == "text" else "int64"), counted)


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        (RNG.integers(0, 10, 500), "number"),
        (RNG.integers(1, 101, 5000), "number"),
        (RNG.integers(-1, 50, 5000), "number"),
        ([4, 7, 9], "number"),
        ([False, True, True], "number"),
        (RNG.choice(["north", "south"], 100), "text"),
        ([f"owner {n}" for n in range(40)] * 10, "text"),
    ],
)
def test_few_values_or_frequent_ones_are_classes(numbers, kind):
    values = values_of(numbers, kind)
    assert values.are_classes
    assert values.bins(8) is None


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        (range(900), "number"),
        (range(10**7, 10**7 + 300), "number"),
        ([f"scans/{n}.png" for n in range(90)], "text"),
        ([f"owner {n}" for n in range(90)] * 2, "text"),
        ([(1 << 62) + n for n in range(90)] * 3, "number"),
    ],
)
def test_identifiers_and_paths_are_neither_classes_nor_binned(numbers, kind):
    values = values_of(numbers, kind)
    assert not values.are_classes
    assert values.bins(8) is None


@pytest.mark.parametrize("most", [8, 40])
@pytest.mark.parametrize(
    "numbers",
    [
        RNG.integers(12, 12 + 24, 90),  # widths of pictures
        RNG.integers(12, 12 + 24, 9000),
        RNG.integers(-50, 50, 300),
        RNG.integers(0, 400, 1700),
        np.concatenate([RNG.integers(0, 30, 300), [10**9, 10**9]]),
    ],
)
def test_numbers_with_many_values_are_binned(numbers, most):
    values = values_of(numbers)
    assert not values.are_classes
    counts, edges = values.bins(most)
    assert len(counts) <= most
    assert counts.tolist() == np.histogram(numbers, edges)[0].tolist()
    assert counts.sum() == len(numbers)
