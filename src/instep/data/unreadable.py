"""Samples that cannot be read: when one counts as such, and what is told of it.

A read that raises is tried again, for a store that fails now and then. Whether
a sample that still cannot be read ends the run or is left out is a setting
(`data.unreadable`); `fetch.py` does as it says. What becomes of the others'
weight in a step, nothing here knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")

PAUSES_S = (0.0, 0.02)
"""How long to wait before each further attempt at a read that raised."""


MOST_CRASHES = 3
"""So many ends of processes at one sample, or by one signal of its own at one step, are no
accident."""

TO_SKIP = " To train without such samples, set data.unreadable = 'skip'."


class Skipped(NamedTuple):
    """A sample that was left out."""

    sample: int
    """Its index in the dataset."""
    cause: str
    """What the last attempt raised, and on which of the user's lines."""


class Read(NamedTuple):
    """What came of a slice."""

    batch: Any
    """None where no sample of it was read."""
    size: int
    """Samples in the batch."""
    skipped: tuple[Skipped, ...] = ()
    """Those of the slice that are not."""


def tried(read: Callable[[], Value]) -> Value:
    """The value of a read that may raise now and then; the last attempt's error is raised."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except Exception:
            time.sleep(pause_s)
    return read()
