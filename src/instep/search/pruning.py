"""Bounds for a trial at each rung, from the trials whose results were told before it began.

A bound becomes a rule of the trial's own run (`stop.bounds`). So it is decided once, at a commit,
by the master of that run, whether the search is alive or not. Pure functions. Way in: `bounds_of`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from instep.job.search import SearchSpec
from instep.search.results import ToldTrial

ONE_IN = 4
"""So many of the trials that get to a rung pass it, with `prune = "halving"`."""

FIRST = 5
"""With `prune = "median"` nothing is pruned before so many trials have completed."""


def bounds_of(
    spec: SearchSpec, told: Sequence[ToldTrial], *, upwards: bool
) -> tuple[tuple[int, float], ...]:
    """A bound for each rung at which a trial is to be pruned if it is worse.

    Args:
        spec: of the search.
        told: the trials before it, in the order of their numbers.
        upwards: whether a larger metric is better.
    """
    if spec.prune == "none":
        return ()
    bound = _halving if spec.prune == "halving" else _median
    found = [(rung, bound(rung, told, upwards)) for rung in spec.rungs]
    return tuple((rung, each) for rung, each in found if each is not None)


def _halving(rung: int, told: Sequence[ToldTrial], upwards: bool) -> float | None:
    """The last value among the best quarter, where this trial is one of them."""
    values = sorted(
        (v for each in told for r, v in each.result.rungs if r == rung), reverse=upwards
    )
    passing = max(1, (len(values) + 1) // ONE_IN)
    return values[passing - 1] if len(values) >= passing else None


def _median(rung: int, told: Sequence[ToldTrial], upwards: bool) -> float | None:
    completed = [each.result for each in told if each.result.state == "completed"]
    values = [v for result in completed for r, v in result.rungs if r == rung]
    return statistics.median(values) if len(completed) >= FIRST and values else None
