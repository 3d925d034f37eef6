"""What each rank alone carries over from step to step, and what becomes of it between generations.

It lies in memory that outlives the process, so that the replacement of a killed one has it; who
leaves hands it over first. A start that breaks counts on all ranks or on none: `resolve` says so.

It knows no codecs: how things lie in a slot, a `reducers.Layout` says, and what is written there
in a step is a reducer's affair. Way in: `CarriedOver`, which `AllReduce` and `ServerSync` hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.records import BEGINNING, Attempt
from instep.sync.generation import Memory
from instep.sync.reducers import Layout


class CarriedOver:
    """Of one rank, by kind and parameter; only the sum over the ranks counts."""

    def __init__(self) -> None:
        self._carried = _Carried({})  # between two generations
        self._next: tuple[int, _Carried] | None = None  # the same, if this generation's start holds
        self._memory: Memory | None = None
        self._attempt = BEGINNING

    @property
    def totals(self) -> Mapping[str, Tensor]:
        """As `own_state` gives it, between two generations."""
        return self._carried.totals

    def keep(self, layout: Layout, rank: int, flat: Tensor) -> None:
        """A generation is over: take a copy of what lies in a slot."""
        self._carried = _Carried.of(layout, rank, flat)

    def start(
        self,
        comm: Comm,
        layout: Layout | None,
        *,
        everyone: Comm,
        memory: Memory | None,
        at: Attempt,
        place: Sequence[int],
        draining: Sequence[int],
        like: Mapping[str, Tensor],
        idle: Collection[int] = (),
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Lay out two slots, of which the first begins with what was carried before.

        What there was before counts until every rank has got so far.

        Args:
            comm: the ranks that agree.
            layout: of a slot; None where this rank carries nothing.
            everyone: all ranks of the run.
            memory: outlives the process.
            at: the commit that all hold, in this generation.
            place: where this rank is, to be found in memory by the process that takes its place.
            draining: ranks that leave, and give what they carry to the lowest other one.
            like: of what draining ranks may carry, by kind and parameter: a tensor like it.
            idle: ranks that carry nothing.
            device: of the slots.

        Raises:
            PeerError: a rank went away.
        """
        count = layout.room(comm.rank) if layout is not None else 0
        empty = torch.zeros(count, dtype=torch.float32, device=device)
        slots = empty, empty.clone()
        carried = self._handed_over(comm, draining, idle, like) if draining else self._carried
        if memory is not None:
            there = torch.tensor(place)
            memory.lay_out(
                {"residual": ((count,), torch.float32), "place": (tuple(there.shape), torch.int64)}
            )
            slot = memory.stage(*at)
            slot["place"].copy_(there)
            slots = slot["residual"], slots[1]
        if layout is not None:
            carried.fill(slots[0], layout, comm)
        if memory is not None:
            memory.staged(*at)
        nothing = torch.zeros(1, dtype=torch.float32, device=device)
        everyone.all_reduce(nothing).wait()  # all have laid out theirs
        self._next = at.generation, carried
        everyone.all_reduce(nothing).wait()  # all know it
        if memory is not None:
            slot = memory.stage(*at._replace(number=at.number + 1))
            slot["place"].copy_(there)
            slots = slots[0], slot["residual"]
        self._memory, self._next = memory, None
        return slots

    def _handed_over(
        self, comm: Comm, draining: Sequence[int], idle: Collection[int], like: Mapping[str, Tensor]
    ) -> _Carried:
        """What this rank carries once those that leave have given theirs to the lowest other."""
        totals = dict[str, Tensor]()
        taker = min(rank for rank in range(comm.size) if rank not in {*draining, *idle})
        for name, one in like.items():
            nothing = torch.zeros_like(one)
            mine = self.totals.get(name, nothing)
            given = mine.clone() if comm.rank in draining else nothing.clone()
            comm.all_reduce(given).wait()
            if comm.rank not in {*draining, *idle}:
                totals[name] = mine + given if comm.rank == taker else mine
        return _Carried(totals)

    @property
    def start_in_doubt(self) -> int:
        """As of `Strategy`."""
        return self._next[0] if self._next is not None else -1

    def resolve(self, generation: int) -> None:
        """What was handed over counts, or does not, on every rank alike."""
        if self._next is not None and self._next[0] == generation:
            self._carried = self._next[1]
        self._next = None

    # ---- a step

    def begin_step(self, attempt: Attempt) -> None:
        """What is written into the other slot from here on belongs to this commit."""
        self._attempt = attempt
        if self._memory is not None:
            self._memory.stage(*attempt)

    def stamp(self, _: int = 0) -> None:
        """All that the step leaves has been written."""
        if self._memory is not None:
            self._memory.staged(*self._attempt)

    # ---- from elsewhere

    def load(self, totals: Mapping[str, Tensor]) -> None:
        """Carry this from the next start on."""
        self._carried, self._next = _Carried(totals), None


class _Carried(NamedTuple):
    """What a rank alone remembers, between two generations."""

    totals: Mapping[str, Tensor]
    """As `own_state` gives it."""
    flat: Tensor | None = None
    """The same as it lay in memory, of one rank among the owners of segments."""
    rank: int = 0
    owners: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: Layout, rank: int, flat: Tensor) -> _Carried:
        """Copied from a rank's slot."""
        return cls(layout.state_of(flat, rank), flat.clone(), rank, layout.owners)

    def fill(self, slot: Tensor, layout: Layout, comm: Comm) -> None:
        """Have a slot begin with them. A rank that has its place of before gets them as they lay,
        so that further steps have the same bits."""
        if self.flat is not None and (self.rank, self.owners) == (comm.rank, layout.owners):
            slot.copy_(self.flat)
        else:
            layout.fill(slot, comm.rank, self.totals)
