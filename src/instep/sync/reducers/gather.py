"""Sum flat segments over the ranks by giving every rank what all have encoded.

For codecs whose payloads differ in size, or cannot be cut: sizes travel first, in one message for
all buckets. All ranks decode the same payloads in rank order, so their sums are equal to the bit.
A rank receives W - 1 payloads of whole buckets, W being the number of ranks; in two phases it would
be the size of two. What a codec drops is carried over, as in `two_phase.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.codecs.base import Codec, aligned, draw_key
from instep.sync.reducers import OWN_ROOM, Room
from instep.sync.reducers.residuals import Residuals
from instep.sync.reducers.whole_buckets import WholeBuckets


class Payloads:
    """Payloads of any size, of which every rank gets those of all.

    Args:
        comm: the ranks.
        sizes: for each bucket, the most bytes of its payload.
        device: where they live.
    """

    def __init__(self, comm: Comm, sizes: Sequence[int], device: torch.device | str) -> None:
        self._comm = comm
        self.out = [
            torch.zeros(aligned(max(n, 1)), dtype=torch.uint8, device=device) for n in sizes
        ]
        """For each bucket, where to write this rank's."""

    def gather(self, used: Sequence[int], totals: Sequence[Tensor], codec: Codec) -> None:
        """Make each bucket the sum of what all ranks have encoded of it.

        Args:
            used: for each bucket, the bytes of this rank's payload.
            totals: the buckets; what is in them is replaced.
            codec: decodes.

        Raises:
            PeerError: a rank went away.
        """
        if not used:
            return
        comm, count = self._comm, len(used)
        own = torch.tensor(used, device=self.out[0].device)
        every = own.new_zeros(comm.size * count)
        comm.all_gather(every, own).wait()
        sizes = every.view(comm.size, count).tolist()
        work, rooms = list[Work](), list[Tensor]()
        for number, out in enumerate(self.out):
            longest = aligned(max(1, *(each[number] for each in sizes)))
            rooms.append(out.new_empty(comm.size * longest))
            work.append(comm.all_gather(rooms[-1], out[:longest]))
        for number, total in enumerate(totals):
            work[number].wait()
            total.zero_()
            for rank, payload in enumerate(rooms[number].view(comm.size, -1)):
                if total.numel():
                    codec.add_into(total, payload[: sizes[rank][number]])


class Gather(Residuals[Codec]):
    """A `Reducer` for every codec; one with a true attribute `exact` drops nothing."""

    @staticmethod
    def kinds(codec: Codec) -> tuple[str, ...]:
        """What is dropped, if anything may be."""
        return () if getattr(codec, "exact", False) else ("residual",)

    def __init__(
        self, codec: Codec, comm: Comm, layout: WholeBuckets, room: Room = OWN_ROOM
    ) -> None:
        super().__init__(codec, comm, layout, room)
        sizes = [codec.size(length) for length in layout.lengths]
        self._payloads = Payloads(comm, sizes, room.device)

    def _forget(self) -> None:
        super()._forget()
        self._used: list[int] = []

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Encode a bucket; it is sent when the sizes of all are known."""
        values = self._taken(number, flat)
        left = self._add_left(number, values)
        out, mixed = self._payloads.out[number], draw_key(key, number, self._comm.rank)
        self._used.append(self._codec.encode(values, out, key=mixed, left=left))

    @torch.no_grad()
    def finish(self) -> None:
        """Gather the sizes, and then the payloads of each bucket."""
        assert self._is_complete(), "each bucket begins first"
        self._still_carry_residuals()
        self._stage()
        self._payloads.gather(self._used, self._flats, self._codec)
        for number in range(len(self._flats)):
            self._leave_out(number)
