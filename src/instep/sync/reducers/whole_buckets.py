"""What a rank carries over where it has something for every element of every bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep.sync.reducers import Buckets, Place


class WholeBuckets(Buckets):
    """A `Layout`: kind after kind, each with all buckets, one after the other; alike on all ranks.

    Args:
        kinds: of what is carried over.
        buckets: as for `Reducer.layout`.
    """

    owners: tuple[int, ...] = ()

    def __init__(self, kinds: Sequence[str], buckets: Sequence[Sequence[Place]]) -> None:
        super().__init__(buckets)
        self.kinds = list(kinds)

    def room(self, rank: int) -> int:
        """As many on every rank."""
        return len(self.kinds) * sum(self.lengths)

    def cut(self, slot: Tensor) -> list[list[Tensor]]:
        """For each kind, what there is of each bucket [elements of the bucket], as views."""
        each = slot[: self.room(0)].split(sum(self.lengths) or 1)
        empty = [slot[:0]] * len(self.kinds)
        return [list(kind.split(self.lengths)) for kind in (each if self.room(0) else empty)]

    def state_of(self, slot: Tensor, rank: int) -> dict[str, Tensor]:
        """What is carried over, in the shapes of the parameters."""
        return {name: part.clone() for name, part in self._named(slot)}

    @torch.no_grad()
    def fill(self, slot: Tensor, rank: int, state: Mapping[str, Tensor]) -> None:
        """Have a slot hold this."""
        slot.zero_()
        for name, part in self._named(slot):
            if name in state:
                part.copy_(state[name])

    def _named(self, slot: Tensor) -> list[tuple[str, Tensor]]:
        return [
            (f"{kind}/{place.name}", part)
            for kind, buckets in zip(self.kinds, self.cut(slot), strict=True)
            for number, flat in enumerate(buckets)
            for place, part in zip(self.buckets[number], self.members(number, flat), strict=True)
        ]
