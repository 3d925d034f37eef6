"""Samples that cannot be read: when a sample counts as unreadable, and what is reported.

A read that raises is tried again, because storage fails now and then. Whether a sample
that still cannot be read ends the run or is skipped is a setting (`data.unreadable`), which
`fetch.py` applies. How the rest of the step is then weighted is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from instep.errors import one_line, own_line

Value = TypeVar("Value")

RETRY_PAUSES_S = (0.0, 0.02)
"""How long to wait before each further attempt at a read that raised."""

MAX_CRASHES = 3
"""This many crashes at one sample, or from one signal of its own at one step, are no accident."""

SKIP_HINT = " To leave such samples out, set data.unreadable = 'skip'."


class Skipped(NamedTuple):
    """A sample that was skipped."""

    sample: int
    """Its index in the dataset."""
    cause: str
    """What the last attempt raised, and on which line of the user's code."""


class Read(NamedTuple):
    """The result of reading a slice."""

    batch: Any
    """None where no sample of the slice was read."""
    size: int
    """Samples in the batch."""
    skipped: tuple[Skipped, ...] = ()
    """Samples of the slice that are not in the batch."""


def read_with_retries(read: Callable[[], Value]) -> Value:
    """The value of a read that may raise now and then; raises the last attempt's error."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return read()
        except Exception:
            time.sleep(pause_s)
    return read()


def describe_error(error: BaseException) -> str:
    """`ValueError: bad pixel (digits.py:31)`: type, text on one line, and the user's own line.

    The line is the innermost one outside instep, the standard library and
    installed packages; it is left out where there is none.
    """
    text = one_line(error) or "no text"
    place, _ = own_line(error)
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")
