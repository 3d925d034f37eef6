"""Where the steps of an epoch end, where they are not all of one size.

An epoch's order stays one sequence of positions, and a step takes the next range of it. So ledger,
audit and resume know positions alone, whatever cuts them. A `StepSizes` says how many steps an
epoch has and which range each takes: one integer for a step, derived, and none for a sample.
`Batches` asks it, and everything that needs a step's place asks `Batches`.

To add a way of cutting: a class with these members, given to `Batches`. Where all that varies is
the size of each step, `DrawnSizes` is one; where that of each epoch, `EvenSizes`. Reports, which
know neither datasets nor secret keys, read what steps took from the ledger: `RecordedSizes`. It
knows no datasets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from instep.data.order import CutPosition, Indices, Position

_KEPT = 4
"""Epochs whose steps are remembered."""
_NEWEST = 1000
"""Steps that `NewestSteps` remembers."""


class StepSizes(Protocol):
    """Cuts the positions of each epoch into steps: a function of the job and the epoch."""

    steps: int
    """Steps of each epoch, 1 or more."""
    total: int | None
    """Positions of each epoch; None where epochs differ in them."""

    def positions(self, epoch: int) -> int:
        """Positions of an epoch, at which its last step ends."""

    def of(self, epoch: int, number: int) -> Position:
        """Range that step `number` of an epoch takes, from 0.

        The first begins at position 0, each other where the one before ends; a step may be empty.
        Its `cuts` say where each of the job's micro-batches begins, and where the last one ends;
        micro-batches may be empty.
        """


class DrawnSizes:
    """Steps whose sizes are drawn for each epoch, such as by a multinomial or a binomial draw.

    Args:
        steps: of each epoch, 1 or more.
        micro_batches: of each step, of even size (`train.micro_batches`).
        draw: gives the sizes of the steps of an epoch, [steps] int64, 0 or more; the same for the
            same epoch, in every process.
        total: the sum of the sizes of every epoch; None where epochs differ in it.
    """

    def __init__(
        self,
        steps: int,
        micro_batches: int,
        draw: Callable[[int], Indices],
        total: int | None = None,
    ) -> None:
        self.steps, self.total = steps, total
        self._parts, self._draw = micro_batches, draw
        self._ends: dict[int, Indices] = {}  # by epoch; replaced, as threads may share it

    def positions(self, epoch: int) -> int:
        """Sum of the sizes."""
        return int(self._ends_of(epoch)[-1])

    def of(self, epoch: int, number: int) -> Position:
        """Range of a step, from 0."""
        ends = self._ends_of(epoch)
        return evenly_cut(
            epoch, int(ends[number - 1]) if number else 0, int(ends[number]), self._parts
        )

    def _ends_of(self, epoch: int) -> Indices:
        if (found := self._ends.get(epoch)) is None:
            found = np.cumsum(self._draw(epoch), dtype=np.int64)
            assert len(found) == self.steps, f"{len(found)} sizes for {self.steps} steps"
            newest = [*self._ends.items()][1 - _KEPT :]
            self._ends = {**dict(newest), epoch: found}
        return found


class EvenSizes:
    """Steps that differ by one position at most, in epochs that differ in theirs.

    Args:
        steps: of each epoch, 1 or more.
        micro_batches: of each step, of even size.
        positions: how many an epoch has.
    """

    total: int | None = None

    def __init__(self, steps: int, micro_batches: int, positions: Callable[[int], int]) -> None:
        self.steps, self.positions, self._parts = steps, positions, micro_batches

    def of(self, epoch: int, number: int) -> Position:
        """Range of a step, from 0."""
        end = self.positions(epoch)
        first, stop = (end * n // self.steps for n in (number, number + 1))
        return evenly_cut(epoch, first, stop, self._parts)


class RecordedSizes:
    """Steps of unequal size as a ledger has them, for whoever cannot derive them.

    Each step begins where the one before it ended, so a record that is not there shows.

    Args:
        steps: of each epoch.
        total: positions of each epoch; None where epochs differ in them.
        ledger: [records] with `step` and `stop`, in any order; a step without samples has records
            too.
    """

    def __init__(self, steps: int, total: int | None, ledger: np.ndarray[Any, Any]) -> None:
        self.steps, self.total = steps, total
        real = ledger[ledger["step"] >= 1]
        self._stops = np.zeros(int(real["step"].max(initial=0)) + 1, np.int64)
        np.maximum.at(self._stops, real["step"], real["stop"])

    def positions(self, epoch: int) -> int:
        """Positions of an epoch; those so far, where they are not known and it has not ended."""
        if self.total is not None:
            return self.total
        within = self._stops[1 + epoch * self.steps : 1 + (epoch + 1) * self.steps]
        return int(within.max(initial=0))

    def of(self, epoch: int, number: int) -> Position:
        """Range that a step has taken, from 0; empty where it has not been recorded."""
        step = 1 + epoch * self.steps + number
        first = self._stop(step - 1) if number else 0
        return Position(epoch, first, max(first, self._stop(step)))

    def _stop(self, step: int) -> int:
        return int(self._stops[step]) if step < len(self._stops) else 0


class NewestSteps:
    """Remembers what the newest steps took, until their losses are there."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int]] = {}

    def add(self, ledger: np.ndarray[Any, Any]) -> None:
        """Take in new records, [any] of `LEDGER`."""
        columns = (ledger[name].tolist() for name in ("step", "first", "stop"))
        for step, first, stop in zip(*columns, strict=True):
            low, high = self._taken.get(step, (first, stop))
            self._taken[step] = min(low, first), max(high, stop)
        for step in [*self._taken][:-_NEWEST]:
            del self._taken[step]

    def of(self, step: int, size: int) -> tuple[int, int]:
        """Positions [first, stop) of a step; as if it had this size where it is not known."""
        return self._taken.get(step, (0, size))


def evenly_cut(epoch: int, first: int, stop: int, parts: int) -> Position:
    """A step that has so many micro-batches whatever its size, which differ by one at most."""
    size = stop - first
    return CutPosition(
        epoch, first, stop, tuple(first + size * n // parts for n in range(parts + 1))
    )
