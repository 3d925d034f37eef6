"""Sum flat segments over the ranks with a codec, in two phases, and lose nothing in the long run.

Each bucket is cut into one segment for each rank, its owner. Phase 1: every rank encodes
each segment and sends it to its owner, who decodes and adds up in rank order. Phase 2:
the owner encodes the sum once, and all ranks, the owner too, decode the same bytes, so
their results are equal to the bit (as in 1-bit Adam: Tang et al. 2021, arXiv:2102.02888).

What a codec drops is carried over to the next step (error feedback: Karimireddy et al.
2019, arXiv:1901.09847): each rank has a residual of what it sent, each owner one of what
it passed on. All are in the unit of the sum, so that their total over the ranks is what
counts, whichever rank holds it: results + residuals after = contributions + residuals before.

Of a parameter that no rank used, nothing comes out: what other values of its block would give it,
and what is still to be sent of it, stays with the owner until it is used.

It knows nothing of parameters' gradients, weights, steps or votes. Residuals lie in two
slots of memory: one is as committed, into the other the next is written while it is
encoded, and `apply` exchanges the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.codecs.base import Codec, aligned, draw_key
from instep.sync.reducers import OWN_ROOM, Buckets, Place, Room
from instep.sync.reducers.two_slots import TwoSlots


class RankSegments(Buckets):
    """Where everything lies, by the buckets' members and the ranks; the same on every rank.

    Args:
        buckets: for each, its members in the order in which they lie in its flat memory,
            without gaps; what follows them there is not summed.
        size: ranks.
        idle: those that own nothing.

    Each bucket's segments are equally long, but for the last ones, which may be shorter or
    empty. Every name stands once.
    """

    def __init__(
        self, buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int] = ()
    ) -> None:
        super().__init__(buckets)
        self.size = size
        self.owners = tuple(rank for rank in range(size) if rank not in idle)

    def segment(self, number: int, rank: int) -> slice:
        """What of a bucket `rank` owns."""
        length, each = self.lengths[number], self.longest(number)
        if rank not in self.owners:
            return slice(length, length)
        place = self.owners.index(rank)
        return slice(min(place * each, length), min((place + 1) * each, length))

    def longest(self, number: int) -> int:
        """Elements of a bucket's first segment."""
        return -(-self.lengths[number] // len(self.owners))

    def room(self, rank: int) -> int:
        """Elements of all residuals of one rank."""
        return sum(self.lengths) + sum(
            _length(self.segment(number, rank)) for number in range(len(self.buckets))
        )

    def cut(self, slot: Tensor, rank: int) -> list[tuple[Tensor, Tensor]]:
        """For each bucket, the residuals of what the rank sends [bucket] and of what it owns."""
        cut, at = [], 0
        for number, length in enumerate(self.lengths):
            owned = _length(self.segment(number, rank))
            cut.append((slot[at : at + length], slot[at + length : at + length + owned]))
            at += length + owned
        return cut

    def state_of(self, slot: Tensor, rank: int) -> dict[str, Tensor]:
        """A rank's total residual for each parameter, in its shape, from one of its slots."""
        state = {}
        for number, (sent, owned) in enumerate(self.cut(slot, rank)):
            total = sent.clone()
            total[self.segment(number, rank)] += owned
            for place, part in zip(self.buckets[number], self.members(number, total), strict=True):
                state[f"residual/{place.name}"] = part.clone()
        return state

    def fill(self, slot: Tensor, rank: int, state: Mapping[str, Tensor]) -> None:
        """Have a rank's slot hold this residual for each parameter; zero for those not named."""
        slot.zero_()
        for number, (sent, _) in enumerate(self.cut(slot, rank)):
            for place, part in zip(self.buckets[number], self.members(number, sent), strict=True):
                if (key := f"residual/{place.name}") in state:
                    part.copy_(state[key])


class TwoPhase(TwoSlots[RankSegments]):
    """A `Reducer` for codecs that are `segmentable` and `fixed_size`: others cannot be dealt."""

    @staticmethod
    def kinds(codec: Codec) -> tuple[str, ...]:
        """What is dropped is carried over, unless the codec is right on average."""
        return () if codec.unbiased else ("residual",)

    @staticmethod
    def layout(buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int]) -> RankSegments:
        """Each rank that is not idle owns a segment of each bucket."""
        return RankSegments(buckets, size, idle)

    def __init__(
        self, codec: Codec, comm: Comm, layout: RankSegments, room: Room = OWN_ROOM
    ) -> None:
        assert layout.size == comm.size, "the layout is made for another number of ranks"
        super().__init__(comm, layout, room, carries=bool(self.kinds(codec)))
        self._codec = codec
        self._cut = [layout.cut(slot, comm.rank) for slot in self._slots if self._carries]
        buckets = range(len(layout.buckets))
        # never 0: each bucket is a message that all wait for, also if nothing is in it
        sizes = [codec.size(layout.longest(number)) for number in buckets]
        self._bytes = [aligned(max(size, 1)) for size in sizes]
        self._out = [self._memory(number, room.device) for number in buckets]
        self._in = [self._memory(number, room.device) for number in buckets]
        longest = max((layout.longest(number) for number in buckets), default=0)
        self._total = torch.empty(longest, dtype=torch.float32, device=room.device)

    def _memory(self, number: int, device: torch.device | str) -> Tensor:
        """[size * bytes]: a payload for each rank, or from each."""
        size = self._comm.size * self._bytes[number]
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def _forget(self) -> None:
        super()._forget()
        self._work: list[Work] = []
        self._keys: list[int] = []

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Encode a bucket, and send each segment to its owner."""
        assert flat.dtype == torch.float32, "sums are in float32"
        layout, comm = self._layout, self._comm
        values = self._taken(number, flat)
        left = self._carry_over(values, number, 0)
        payloads = self._out[number].view(comm.size, -1)
        for owner in range(comm.size):
            part = layout.segment(number, owner)
            rest = left[part] if left is not None else None
            self._encode(values[part], payloads[owner], rest, (key, number, owner, comm.rank))
        self._keys.append(key)
        self._work.append(comm.all_to_all(self._in[number], self._out[number]))

    @torch.no_grad()
    def finish(self) -> None:
        """Add up this rank's segments, and gather the sums of all."""
        assert self._is_complete(), "each bucket begins first"
        last = len(self._flats) - 1
        for number, work in enumerate(self._work):
            work.wait()
            mine = self._add_up(number)
            if number == last:
                self._stage()
            self._work[number] = self._comm.all_gather(self._out[number], mine)
        if last < 0:
            self._stage()
        for number, work in enumerate(self._work):
            work.wait()
            self._read(number)

    def _add_up(self, number: int) -> Tensor:
        """The payload of the sum of this rank's segment."""
        rank = self._comm.rank
        part = self._layout.segment(number, rank)
        total = self._total[: _length(part)].zero_()
        payloads = self._in[number].view(self._comm.size, -1)
        for payload in payloads:
            self._decode(total, payload)
        left = self._carry_over(total, number, 1)
        self._encode(total, payloads[0], left, (self._keys[number], number, rank, -1))
        if left is not None:
            for place in self._layout.places(number, self.unused):
                own = slice(max(place.start - part.start, 0), max(place.stop - part.start, 0))
                left[own] = torch.where(total[own].isfinite(), total[own], 0.0)
        return payloads[0]

    def _carry_over(self, values: Tensor, number: int, part: int) -> Tensor | None:
        """Add the committed residual, of what is sent (0) or owned (1); where the next one goes."""
        if not self._carries:
            return None
        values += self._cut[self._committed][number][part]
        return self._cut[1 - self._committed][number][part]

    def _read(self, number: int) -> None:
        values = self._flats[number].zero_()
        for owner, payload in enumerate(self._out[number].view(self._comm.size, -1)):
            self._decode(values[self._layout.segment(number, owner)], payload)
        self._leave_out(number)

    def _encode(
        self, values: Tensor, out: Tensor, left: Tensor | None, key: tuple[int, ...]
    ) -> None:
        if values.numel():
            self._codec.encode(values, out, key=draw_key(*key), left=left)

    def _decode(self, total: Tensor, payload: Tensor) -> None:
        if total.numel():
            self._codec.add_into(total, payload[: self._codec.size(total.numel())])


def _length(part: slice) -> int:
    return int(part.stop - part.start)
