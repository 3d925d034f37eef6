"""The records of steps of a long run, of which the page shows some before all are read.

Opening a run of any length then costs the same: some records at equal distances, and the end. The
others are read a piece at a time, look by look, and take their place when all are there. Way in:
`EarlySteps`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from instep.dashboard.so_far import SessionOf, StepsSoFar
from instep.events import STEPS
from instep.growing_file import Tail, size_of
from instep.store.run_files import Records, check_steps

LONG = 1 << 18
"""A run of more records is long."""

PLACES, AT_EACH, AT_THE_END = 512, 48, 1 << 14
"""Places at which records are read at first; records at each, and of the end of the file."""

READ_S = 0.15
"""So long is read in one look."""


class EarlySteps:
    """The records that a long run had when it was opened.

    Args:
        path: of the file of records.
        discards, session_of: as of `StepsSoFar`.
    """

    def __init__(
        self, path: Path, discards: Sequence[tuple[float, int]], session_of: SessionOf | None
    ) -> None:
        self._path = path
        self.count = size_of(path) // STEPS.itemsize
        self.steps: StepsSoFar | None = None
        """The results of all of them; None until they are read."""
        self._found, self._tail = StepsSoFar(discards, session_of), Tail(path, STEPS.itemsize)
        self._later: list[Records] = []

    @property
    def is_long(self) -> bool:
        """Whether there are too many to be read at once."""
        return self.count > LONG

    @property
    def end(self) -> int:
        """The byte after the last of them."""
        return self.count * STEPS.itemsize

    @property
    def share(self) -> float:
        """How much of them is read, 0 to 1."""
        return self._tail.at / max(self.end, 1)

    def some(self) -> Records:
        """Records at equal distances, and those of the end, in the order of the file.

        Raises:
            RunError: one of them is damaged.
            OSError: they cannot be read.
        """
        last = self.count - AT_THE_END
        begins = np.linspace(0, last - AT_EACH, PLACES).astype(np.int64)
        pieces = [self._at(int(begin), AT_EACH) for begin in begins]
        found = np.concatenate([*pieces, self._at(last, AT_THE_END)])
        check_steps(found, self._path)
        return found

    def _at(self, begin: int, count: int) -> Records:
        tail = Tail(self._path, STEPS.itemsize, begin * STEPS.itemsize)
        return np.frombuffer(tail.new(count * STEPS.itemsize), STEPS)

    def read(self) -> None:
        """Read on for `READ_S`; `steps` is there when all are read.

        Raises:
            Rewritten: what was read has changed.
            RunError: a record is damaged.
            OSError: they cannot be read.
        """
        until = time.monotonic() + READ_S
        while self._tail.at < self.end:
            records = np.frombuffer(self._tail.new_before(self.end), STEPS)
            if not len(records):
                break
            check_steps(records, self._path)
            self._found.take(records)
            if time.monotonic() >= until:
                break
        if self._tail.at >= self.end:
            for records in self._later:
                self._found.take(records)
            self.steps = self._found

    def take(self, records: Records) -> None:
        """Keep records that have come since, until those before them are read."""
        self._later.append(records)
