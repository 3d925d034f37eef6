"""How long a run made no progress after each of several moments, and which steps it repeated.

Pure functions of raw step records. These include the steps that were discarded when the
run went back to a checkpoint (`RunFolder.steps` leaves them out): they too show when
workers trained. Ways in: `recoveries`, `computed_twice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from instep.store.run_files import Floats, Records, step_ends

QUANTILES = {"median": 50, "p90": 90, "p99": 99, "worst": 100}


def recoveries(
    steps: Records, formed: Sequence[float], moments: Sequence[float], workers: int
) -> Floats:
    """Seconds from each moment to the end of the next step that all workers committed.

    A step counts if `workers` workers recorded it in one generation (a period in which the
    members do not change), each with an end after the moment. The last of these ends is
    when the run was complete again.

    Args:
        steps: [records] of `events.STEPS`, in any order; all of them.
        formed: when each generation was formed, Unix seconds.
        moments: Unix seconds.
        workers: the full number.

    Returns:
        [moments] seconds; NaN where no such step followed.
    """
    first, last = _whole_steps(steps, formed, workers)
    soonest = np.minimum.accumulate(last[::-1])[::-1]  # of all whose first end is no earlier
    at = np.searchsorted(first, moments, side="right")
    found: Floats = np.append(soonest, np.nan)[at] - np.asarray(moments, dtype=np.float64)
    return found


def _whole_steps(steps: Records, formed: Sequence[float], workers: int) -> tuple[Floats, Floats]:
    """First and last end of each step that all workers recorded, ordered by the first."""
    generation = _generation(steps, formed)
    order = np.lexsort((steps["worker"], steps["step"], generation))
    ends, worker = step_ends(steps)[order], steps["worker"][order]
    if not len(ends):
        return ends, ends
    new = _changes(generation[order]) | _changes(steps["step"][order])
    at = np.flatnonzero(new)
    whole = np.add.reduceat((new | _changes(worker)).astype(np.int64), at) >= workers
    first, last = np.minimum.reduceat(ends, at)[whole], np.maximum.reduceat(ends, at)[whole]
    by_first = np.argsort(first, kind="stable")
    return first[by_first], last[by_first]


def _generation(steps: Records, formed: Sequence[float]) -> NDArray[np.int64]:
    """How many generations had been formed when each step began, [records]."""
    return np.searchsorted(sorted(formed), steps["begin"], side="right").astype(np.int64)


def _changes(values: Records) -> NDArray[np.bool_]:
    """Where the value changes, [values]; True at the first."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def quantiles(seconds: Floats) -> dict[str, float]:
    """`median`, `p90`, `p99` and `worst`, without NaNs; empty if there are only NaNs."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return {}
    return {name: float(np.percentile(known, share)) for name, share in QUANTILES.items()}


def computed_twice(steps: Records, formed: Sequence[float]) -> set[int]:
    """Steps that were recorded as committed in two generations or more.

    A worker sends its records a few times a second. What it had not sent when it was
    killed is missing, so there may be more such steps.

    Args:
        steps, formed: as for `recoveries`.
    """
    pairs = np.unique(np.stack([steps["step"], _generation(steps, formed)]), axis=1)
    number, generations = np.unique(pairs[0], return_counts=True)
    return {int(step) for step in number[generations > 1]}
