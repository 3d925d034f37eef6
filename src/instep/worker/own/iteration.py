"""One iteration of a user's own loop: what it is given, and what has happened in it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from instep.engine.passes import Pass

_ITERATIONS = itertools.count(1)


class Batch(NamedTuple):
    """A batch of the user's loader."""

    value: Any


class Iteration:
    """The present iteration of the user's loop."""

    def __init__(self, part: Pass, samples: int, *, last: bool) -> None:
        self.number = next(_ITERATIONS)
        self.part, self.samples, self.last = part, samples, last
        self.weight = 0.0 if part.repeats else float(samples)
        self.total = 0.0
        """Of the losses of its backward passes, each times the weight."""
        self.held = 0.0
        """Of those inside `no_sync`."""
        self.begun = self.computed = self.stepped = False
