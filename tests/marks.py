"""Marks for single cases of a parametrized test, and what the suite leaves to others of a grid."""

import re
from collections.abc import Iterable, Mapping

import pytest

ELSEWHERE = {"slow", "long", "timed", "cuda", "parity"}
"""Marks of what the suite leaves to others anyway."""


def slow(*values: object) -> pytest.ParameterSet:
    """A case that the suite leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: object) -> pytest.ParameterSet:
    """One that is left to `make test-long`."""
    return pytest.param(*values, marks=pytest.mark.long)


def tail(*values: object) -> pytest.ParameterSet:
    """One that is left to `make test-tail`, which `.ci/run` calls."""
    return pytest.param(*values, marks=pytest.mark.tail)


def covers(indices: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether a case of a grid is one of those that have each value of each axis between them.

    They are the diagonal: case number n has value n of each axis, from the first again after the
    last.

    Args:
        indices: the place of the case's value on each axis.
        sizes: of each axis.
    """
    return any(
        all(place == number % sizes[axis] for axis, place in indices.items())
        for number in range(max(sizes.values(), default=1))
    )


def leave_to_the_tail(items: Iterable[pytest.Item]) -> None:
    """Of each test with the mark `grid`, mark what its diagonal does not need.

    `grid(most)` keeps so many of the diagonal, from its first to its last.
    """
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "grid" in marks and not marks & ELSEWHERE:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        kept = _kept(cases)
        for case in cases:
            if case not in kept:
                case.add_marker("tail")


def _kept(cases: list[pytest.Function]) -> list[pytest.Function]:
    places = _places(cases)
    sizes = {axis: 1 + max(each[axis] for each in places) for axis in places[0]}
    kept = [c for c, indices in zip(cases, places, strict=True) if covers(indices, sizes)]
    mark = cases[0].get_closest_marker("grid")
    most = min(len(kept), *mark.args) if mark and mark.args else len(kept)
    return [kept[number * (len(kept) - 1) // max(most - 1, 1)] for number in range(most)]


def _places(cases: list[pytest.Function]) -> list[dict[str, int]]:
    """The place of each case's value on each axis; an axis is what one `parametrize` names.

    By the values themselves: in some releases of pytest `indices` are the number of the case.
    """
    axes = [str(mark.args[0]) for mark in cases[0].iter_markers("parametrize")]
    names = {axis: re.findall(r"\w+", axis) for axis in axes}
    values: dict[str, list[tuple[int, ...]]] = {axis: [] for axis in axes}
    found = []
    for case in cases:
        places = {}
        for axis, seen in values.items():
            value = tuple(id(case.callspec.params[name]) for name in names[axis])
            if value not in seen:
                seen.append(value)
            places[axis] = seen.index(value)
        found.append(places)
    return found
