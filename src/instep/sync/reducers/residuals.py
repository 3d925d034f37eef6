"""What a rank leaves out of each bucket and adds in the next step, if it carries nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from instep.comm.base import Comm
from instep.sync.reducers import OWN_ROOM, Place, Room
from instep.sync.reducers.two_slots import TwoSlots
from instep.sync.reducers.whole_buckets import WholeBuckets

C = TypeVar("C")


class Residuals(TwoSlots[WholeBuckets], Generic[C]):
    """To inherit from: all of a `Reducer` but `begin` and `finish`."""

    @staticmethod
    def kinds(codec: Any) -> tuple[str, ...]:
        """What is left out; empty where nothing is."""
        raise NotImplementedError

    @staticmethod
    def layout(buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int]) -> WholeBuckets:
        """A residual for every element."""
        return WholeBuckets(("residual",), buckets)

    def __init__(self, codec: C, comm: Comm, layout: WholeBuckets, room: Room = OWN_ROOM) -> None:
        super().__init__(comm, layout, room, carries=bool(self.kinds(codec)))
        self._codec = codec
        self._residuals = [layout.cut(slot)[0] for slot in self._slots if self._carries]

    def _still_carry_residuals(self) -> None:
        """Of the members that nobody has used."""
        if self._carries:
            before, after = self._residuals[self._committed], self._residuals[1 - self._committed]
            for number, (old, new) in enumerate(zip(before, after, strict=True)):
                self._still_carry(number, old, new)

    def _add_left(self, number: int, values: Tensor) -> Tensor | None:
        """Add to a bucket what was left out of it; returns where to write what is left out now,
        which holds anything, or None."""
        if not self._carries:
            return None
        values += self._residuals[self._committed][number]
        return self._residuals[1 - self._committed][number]
