"""What a rank alone carries over, in two slots of memory: what all reducers share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.sync.reducers import Layout, Room

L = TypeVar("L", bound=Layout)


class TwoSlots(Generic[L]):
    """One slot is as committed; into the other a step writes, and `apply` exchanges the two.

    Args:
        carries: whether anything is carried over; without, the slots are empty.
        comm, layout, room: as for `Reducer`.
    """

    def __init__(self, comm: Comm, layout: L, room: Room, *, carries: bool = True) -> None:
        self._comm, self._layout, self._tell, self._carries = comm, layout, room.staged, carries
        count = layout.room(comm.rank) if carries else 0
        empty = torch.zeros(count, dtype=torch.float32, device=room.device)
        self._slots = room.slots or (empty, empty.clone())
        self._committed = 0
        self._forget()

    def _forget(self) -> None:
        """A step is over."""
        self._flats: list[Tensor] = []
        self._is_staged = False
        self.unused: Collection[str] = ()
        """As of `Reducer`."""

    @property
    def committed(self) -> int:
        """The number of the slot that is as committed, 0 or 1."""
        return self._committed

    @property
    def carried(self) -> Tensor:
        """The committed slot."""
        return self._slots[self._committed]

    def _taken(self, number: int, flat: Tensor) -> Tensor:
        """The values of the next bucket [its elements]."""
        assert number == len(self._flats), "buckets begin in their order"
        self._flats.append(flat[: self._layout.lengths[number]])
        return self._flats[-1]

    def _is_complete(self) -> bool:
        return len(self._flats) == len(self._layout.lengths)

    def _leave_out(self, number: int) -> None:
        """Of a bucket, nothing is summed of the members that nobody has used."""
        for place in self._layout.places(number, self.unused):
            self._flats[number][place] = 0.0

    def _still_carry(self, number: int, before: Tensor, after: Tensor) -> None:
        """What is carried over of these members of a bucket is what was before."""
        for place in self._layout.places(number, self.unused):
            after[place] = before[place]

    def _stage(self) -> None:
        """All that this step leaves lies in the other slot."""
        self._is_staged = True
        if self._tell is not None:
            self._tell(1 - self._committed)

    def apply(self) -> None:
        """What is staged is committed."""
        assert self._is_staged, "what is staged is not complete"
        self._committed = 1 - self._committed
        self._forget()

    def abandon(self) -> None:
        """All is as before the step."""
        self._forget()

    def own_state(self) -> dict[str, Tensor]:
        """What this rank carries over for each parameter, as committed."""
        return self._layout.state_of(self.carried, self._comm.rank) if self._carries else {}

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take up."""
