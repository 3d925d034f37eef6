"""Lines of progress of a preparation: how many tasks are done, and how long the others take."""

from __future__ import annotations

import time
from collections.abc import Callable

from instep.units import readable_count, readable_seconds

SAID_S = 2.0
"""Seconds between two lines."""


class Progress:
    """Of one kind of tasks.

    Args:
        verb: as 'prepared'.
        tasks: how many there are.
        say: prints a line.
        before: how many were done already.
    """

    def __init__(self, verb: str, tasks: int, say: Callable[[str], None], before: int = 0) -> None:
        self._verb, self._tasks, self._say = verb, tasks, say
        self._before, self._done, self._records = before, before, 0
        self._began = self._said = time.monotonic()

    def step(self, records: int = 0) -> None:
        """A task is done."""
        self._done, self._records = self._done + 1, self._records + records
        now = time.monotonic()
        if now - self._said < SAID_S:
            return
        self._said, took_s = now, now - self._began
        left_s = took_s / (self._done - self._before) * (self._tasks - self._done)
        rate = f", {readable_count(self._records / took_s)} records/s" if self._records else ""
        share = self._done / self._tasks
        self._say(f"{self._verb} {share:.0%}{rate}, {readable_seconds(left_s)} left")
