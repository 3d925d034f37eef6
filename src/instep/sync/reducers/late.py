"""Answer with the sums of the step before, while this step's contributions wait for the next.

What a rank gives in a step is copied into the staged slot. From the beginning of the next step it
is on its way, while the passes compute; the answer of that step is its sum. Until then it is this
rank's alone, as residuals are: the sum over the ranks counts, and a slot outlives the process. So
nothing is lost with a process or a group: the next one sends again what the committed slot holds.

The job's last step gives both: `finish` leaves its own sums in `rest`, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.codecs.base import Codec
from instep.sync.reducers import OWN_ROOM, Layout, Place, Room
from instep.sync.reducers.two_slots import TwoSlots
from instep.sync.reducers.whole_buckets import WholeBuckets

KIND = "late"

_ALIGNED = 4
"""Elements of float32 at whose multiples a bucket begins: 16 bytes, enough for every type."""


class Waiting(WholeBuckets):
    """A `Layout` of contributions, each in the type of its bucket."""

    def __init__(self, buckets: Sequence[Sequence[Place]]) -> None:
        super().__init__((KIND,), buckets)
        self._types = [bucket[0].dtype for bucket in buckets]
        sizes = zip(self.lengths, self._types, strict=True)
        self._rooms = [-(-n * dtype.itemsize // (4 * _ALIGNED)) * _ALIGNED for n, dtype in sizes]

    def room(self, rank: int) -> int:
        """As many on every rank."""
        return sum(self._rooms)

    def cut(self, slot: Tensor) -> list[list[Tensor]]:
        """As views, in their types."""
        parts = zip(slot.split(self._rooms), self._types, self.lengths, strict=True)
        return [[part.view(dtype)[:length] for part, dtype, length in parts]]


class Late(TwoSlots[Waiting]):
    """A `Reducer` without a codec, for buckets of any type.

    Args:
        comm, layout, room: as for `Reducer`.
    """

    @staticmethod
    def kinds(codec: Codec) -> tuple[str, ...]:
        """What was given in the last step."""
        return (KIND,)

    @staticmethod
    def layout(buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int]) -> Waiting:
        """Room for every element."""
        return Waiting(buckets)

    def __init__(self, comm: Comm, layout: Layout, room: Room = OWN_ROOM) -> None:
        assert isinstance(layout, Waiting), "as `layout` gave it"
        super().__init__(comm, layout, room)
        self._held = [layout.cut(slot)[0] for slot in self._slots]
        self._sums = [torch.empty_like(part) for part in self._held[0]]
        self._work: list[Work] | None = None
        self._is_last = False
        self.told: tuple[float, ...] = ()
        """What was told of the contributions that the answer of this step is the sum of; empty
        where there are none."""
        self._next: tuple[float, ...] = ()
        self.rest: list[Tensor] = []
        """For each bucket, the sum of what was given in the last step; after its `finish`."""

    def begin_step(self, *, last: bool) -> None:
        """Send what was given in the step before; once in a step, though its passes run again.

        Args:
            last: whether nothing may wait after this step.

        Raises:
            PeerError: a rank went away.
        """
        self._is_last = last
        if self._work is not None or not self.told:
            return
        for total, given in zip(self._sums, self._held[self._committed], strict=True):
            total.copy_(given)
        self._work = [self._comm.all_reduce(total) for total in self._sums]

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Keep a bucket; after the last one, all that this step leaves is staged."""
        values = self._taken(number, flat)
        kept = self._held[1 - self._committed][number]
        if self._is_last:
            kept.zero_()
        else:
            kept.copy_(values)
        if self._is_complete():
            self._stage()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what is on its way; each bucket then holds the sum of the step before."""
        assert self._is_complete(), "each bucket begins first"
        if self._is_last:
            self.rest = [values.clone() for values in self._flats]
            for work in [self._comm.all_reduce(total) for total in self.rest]:
                work.wait()
        if self._work is not None:
            for work in self._work:
                work.wait()
            self._work = []
            for values, total in zip(self._flats, self._sums, strict=True):
                values.copy_(total)

    def tell(self, numbers: Sequence[float]) -> None:
        """Say something of what was given in this step, the same on every rank; it comes back as
        `told` with its sum."""
        self._next = tuple(numbers)

    @property
    def told_of_rest(self) -> tuple[float, ...]:
        """What was told of `rest`."""
        return self._next

    def apply(self) -> None:
        """What was given waits for the next step."""
        super().apply()
        self.told, self._next = () if self._is_last else self._next, ()
        self._work, self.rest = None, []

    def abandon(self) -> None:
        """What was given before still waits, or is on its way."""
        super().abandon()
        self._next, self.rest = (), []

    def state(self) -> dict[str, Tensor]:
        """What was told of what waits."""
        return {KIND: torch.tensor(self.told, dtype=torch.float64)} if self.told else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self.told = tuple(state[KIND].tolist()) if KIND in state else ()
