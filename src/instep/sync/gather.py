"""Sum flat segments over the ranks by giving every rank what all have encoded.

For codecs whose payloads differ in size, or cannot be cut: sizes travel first, in one message for
all buckets. All ranks decode the same payloads in rank order, so their sums are equal to the bit.
A rank receives W - 1 payloads of whole buckets, W being the number of ranks; in two phases it would
be the size of two. What a codec drops is carried over, as in `two_phase.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.codecs.base import ALIGNED_BYTES, Codec
from instep.sync.reducers import Place
from instep.sync.whole_buckets import WholeBuckets


class Payloads:
    """Payloads of any size, of which every rank gets those of all.

    Args:
        comm: the ranks.
        sizes: for each bucket, the most bytes of its payload.
        device: where they live.
    """

    def __init__(self, comm: Comm, sizes: Sequence[int], device: torch.device | str) -> None:
        self._comm = comm
        self.out = [torch.zeros(_aligned(n), dtype=torch.uint8, device=device) for n in sizes]
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
            longest = _aligned(max(each[number] for each in sizes))
            rooms.append(out.new_empty(comm.size * longest))
            work.append(comm.all_gather(rooms[-1], out[:longest]))
        for number, total in enumerate(totals):
            work[number].wait()
            total.zero_()
            for rank, payload in enumerate(rooms[number].view(comm.size, -1)):
                if total.numel():
                    codec.add_into(total, payload[: sizes[rank][number]])


class Gather:
    """A `Reducer` for every codec; one with a true attribute `exact` drops nothing."""

    @staticmethod
    def kinds(codec: Codec) -> tuple[str, ...]:
        """What is dropped, if anything may be."""
        return () if getattr(codec, "exact", False) else ("residual",)

    @staticmethod
    def layout(buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int]) -> WholeBuckets:
        """A residual for every element."""
        return WholeBuckets(("residual",), buckets)

    def __init__(
        self,
        codec: Codec,
        comm: Comm,
        layout: WholeBuckets,
        room: tuple[Tensor, Tensor] | None = None,
        *,
        device: torch.device | str = "cpu",
        staged: Callable[[int], None] | None = None,
    ) -> None:
        self._codec, self._comm, self._layout, self._tell = codec, comm, layout, staged
        self._exact, self._committed = not self.kinds(codec), 0
        count = 0 if self._exact else layout.room(comm.rank)
        self._slots = room or (torch.zeros(count, device=device), torch.zeros(count, device=device))
        self._residuals = [[] if self._exact else layout.cut(slot)[0] for slot in self._slots]
        sizes = [codec.size(length) for length in layout.lengths]
        self._payloads = Payloads(comm, sizes, device)
        self._forget()

    def _forget(self) -> None:
        self._flats: list[Tensor] = []
        self._used: list[int] = []
        self._is_staged = False

    @property
    def carried(self) -> Tensor:
        """The committed slot."""
        return self._slots[self._committed]

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Encode a bucket; it is sent when the sizes of all are known."""
        assert number == len(self._flats), "buckets begin in their order"
        values, left = flat[: self._layout.lengths[number]], None
        if not self._exact:
            values += self._residuals[self._committed][number]
            left = self._residuals[1 - self._committed][number]
        out, mixed = (
            self._payloads.out[number],
            (key * 1_000_003 + number) * 65_537 + self._comm.rank,
        )
        self._used.append(self._codec.encode(values, out, key=mixed, left=left))
        self._flats.append(values)

    @torch.no_grad()
    def finish(self) -> None:
        """Gather the sizes, and then the payloads of each bucket."""
        assert len(self._flats) == len(self._layout.buckets), "each bucket begins first"
        self._is_staged = True
        if self._tell is not None:
            self._tell(1 - self._committed)
        self._payloads.gather(self._used, self._flats, self._codec)

    def apply(self) -> None:
        """The staged residuals are the committed ones."""
        assert self._is_staged, "what is staged is not complete"
        self._committed = 1 - self._committed
        self._forget()

    def abandon(self) -> None:
        """The residuals are as before."""
        self._forget()

    def own_state(self) -> dict[str, Tensor]:
        """This rank's residual for each parameter."""
        return {} if self._exact else self._layout.state_of(self.carried, self._comm.rank)

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take up."""


def _aligned(size: int) -> int:
    """Never 0: each bucket is a message, also if nothing is in it."""
    return -(-max(size, 1) // ALIGNED_BYTES) * ALIGNED_BYTES
