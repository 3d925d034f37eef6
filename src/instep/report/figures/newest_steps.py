"""Positions of the newest steps, where steps are of unequal size and only the ledger tells."""

from __future__ import annotations

from instep.store.run_files import Records

_REMEMBERED = 1000


class NewestSteps:
    """Remembers what the newest steps took, until their losses are there."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int]] = {}

    def add(self, ledger: Records) -> None:
        """Take in new records, [any] of `LEDGER`."""
        columns = (ledger[name].tolist() for name in ("step", "first", "stop"))
        for step, first, stop in zip(*columns, strict=True):
            low, high = self._taken.get(step, (first, stop))
            self._taken[step] = min(low, first), max(high, stop)
        for step in [*self._taken][:-_REMEMBERED]:
            del self._taken[step]

    def of(self, step: int, size: int) -> tuple[int, int]:
        """Positions [first, stop) of a step; as if it had this size where it is not known."""
        return self._taken.get(step, (0, size))
