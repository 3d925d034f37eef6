"""Momentum on each rank, of which only the largest values are sent (deep gradient compression).

Every rank keeps a momentum u of its own gradients g, and adds it to a residual v: u <- m u + g,
v <- v + u. The largest values of v are sent, as with `top_k`; there, u and v become 0 (Lin et al.
2018, arXiv:1712.01887, with "momentum factor masking"). So a value that waits in v grows as it
would have with the optimizer's momentum, which therefore must not apply it again. Where all values
are sent nothing waits, u is kept, and the result is that of SGD with momentum.

All ranks get the payloads of all (`gather.py`), and decode them in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.codecs.dgc import DGC
from instep.comm.codecs.none import Identity
from instep.comm.codecs.top_k import TopK
from instep.sync.reducers import OWN_ROOM, Place, Room
from instep.sync.reducers.gather import Payloads
from instep.sync.reducers.two_slots import TwoSlots
from instep.sync.reducers.whole_buckets import WholeBuckets

_KINDS = ("residual", "momentum")


class Dgc(TwoSlots[WholeBuckets]):
    """A `Reducer` that remembers residual and momentum of every element."""

    @staticmethod
    def kinds(codec: DGC) -> tuple[str, ...]:
        """v and u."""
        return _KINDS

    @staticmethod
    def layout(buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int]) -> WholeBuckets:
        """Both, for every element."""
        return WholeBuckets(_KINDS, buckets)

    def __init__(self, codec: DGC, comm: Comm, layout: WholeBuckets, room: Room = OWN_ROOM) -> None:
        super().__init__(comm, layout, room)
        self._codec = codec
        self._cut = [layout.cut(slot) for slot in self._slots]
        self._stages: list[Any] = [
            Identity() if density == 1 else TopK(density=density) for density in codec.densities
        ]
        sizes = [max(each.size(length) for each in self._stages) for length in layout.lengths]
        self._payloads = Payloads(comm, sizes, room.device)

    def _forget(self) -> None:
        super()._forget()
        self._step = 0

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Keep it: the limit is of the norm of all."""
        self._taken(number, flat)
        self._step = key

    @torch.no_grad()
    def finish(self) -> None:
        """Limit, remember, choose; then all ranks get what was chosen."""
        assert self._is_complete(), "each bucket begins first"
        by = self._limit()
        stage = self._stages[self._codec.stage(max(self._step, 1))]
        used = [
            self._choose(number, stage, values.mul_(by))
            for number, values in enumerate(self._flats)
        ]
        self._stage()
        self._payloads.gather(used, self._flats, stage)

    def _limit(self) -> float:
        """What this rank's contribution is multiplied by."""
        if not self._codec.clip or not self._flats:
            return 1.0
        norm = float(torch.stack([flat.norm() for flat in self._flats]).norm())
        limit = self._codec.clip / math.sqrt(self._comm.size)
        return limit / norm if norm > limit else 1.0

    def _choose(self, number: int, stage: Any, values: Tensor) -> int:
        """Write a bucket's payload; returns its bytes."""
        (old_rest, new_rest), (old, new) = (
            (self._cut[self._committed][kind][number], self._cut[1 - self._committed][kind][number])
            for kind in range(len(_KINDS))
        )
        codec, out = self._codec, self._payloads.out[number]
        if codec.nesterov:
            torch.add(old, values, out=new).mul_(codec.momentum)
            values += new
        else:
            torch.add(values, old, alpha=codec.momentum, out=new)
            values.copy_(new)
        values += old_rest
        self._leave_out(number)
        used = int(stage.encode(values, out, key=0, left=new_rest))
        if not isinstance(stage, Identity):
            stage.add_into(values.zero_(), out[:used])
            new.masked_fill_(values != 0, 0.0)
        new.nan_to_num_(0.0, 0.0, 0.0)
        self._still_carry(number, old_rest, new_rest)
        self._still_carry(number, old, new)
        return used
