"""Average the steps of participants: each takes some of its own, then all begin from the mean.

What is given here in a gradient's place is how far a participant moved, backwards: from
where its parameters are to where the round began. The weighted mean of these is what a step of
rate 1 takes off the parameters of the round's beginning (McMahan et al. 2017,
arXiv:1602.05629). So all of it is that of `AllReduce`, which it holds. One thing differs: local
steps are never taken twice. Where a sum did not fit its lattice, the participants' own
contributions, which are kept until the commit, are added up once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.records import BEGINNING, Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import InMesh, Memory, NothingOfItsOwn, Price, Result, Servers

KEPT = "kept/"
"""Begins the names of what `Kept` gives, in the strategy's state."""


class Kept(Protocol):
    """What participants remember from round to round: after a commit the same on every rank."""

    def exchange(self, comm: Comm) -> None:
        """Give every rank what the participants of all ranks remember after this round."""

    def apply(self) -> None:
        """The round happens."""

    def abandon(self) -> None:
        """It does not."""

    def state(self) -> dict[str, Tensor]:
        """As of the last commit."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


class Averaging(NothingOfItsOwn):
    """Weighted mean of what participants give, each in one pass.

    Args:
        bucket_mb: megabytes of one message, at most.

    Raises:
        SpecError: `bucket_mb` is not a positive number.
    """

    def __init__(self, *, bucket_mb: float = 8.0) -> None:
        self._mean = AllReduce(bucket_mb=bucket_mb, overlap=False)
        self._given: list[tuple[float, list[tuple[int, Tensor]]]] = []  # weight, what by slot
        self._comm: Comm
        self.kept: Kept | None = None
        """What participants remember; None where they begin each round anew."""

    def start(
        self,
        parameters: Sequence[Parameter],
        comm: Comm,
        *,
        notes: int,
        parts: int = 0,
        memory: Memory | None = None,
        at: Attempt = BEGINNING,
        draining: Sequence[int] = (),
        servers: Servers | None = None,
        mesh: InMesh | None = None,
    ) -> None:
        """Lay out the buckets."""
        self._given, self._comm = [], comm
        self._mean.start(
            parameters,
            comm,
            notes=notes,
            parts=parts,
            memory=memory,
            at=at,
            draining=draining,
            mesh=mesh,
        )

    def begin_pass(self, weight: float, *, last: bool) -> None:
        """What comes now is another participant's."""
        self._given.append((weight, []))
        self._mean.begin_pass(weight, last=last)

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Add it up, and keep it."""
        self._given[-1][1].append((slot, gradient))
        self._mean.gradient(slot, gradient)

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor:
        """All talking. Where the lattices had to be chosen anew, it is done once more."""
        agreed = self._mean.exchange(notes)
        if agreed is None:
            for weight, given in self._given:
                self._mean.begin_pass(weight, last=False)
                for slot, gradient in given:
                    self._mean.gradient(slot, gradient)
            agreed = self._mean.exchange(notes)
            assert agreed is not None, "the sum was to be computed for a third time"
        self._given = []
        return agreed

    def prepare(self, step: int, scale: float) -> None:
        """Every rank gets what participants remember; it lies staged."""
        if self.kept is not None:
            self.kept.exchange(self._comm)

    def hand_out(self) -> None:
        """Give each parameter the mean, as its `.grad`."""
        self._mean.hand_out()

    def apply(self, update: Callable[[], Result]) -> Result:
        """Move by what was handed out."""
        if self.kept is not None:
            self.kept.apply()
        return self._mean.apply(update)

    def abandon(self) -> None:
        """The round does not happen; what participants gave is given again."""
        self._given = []
        if self.kept is not None:
            self.kept.abandon()
        self._mean.abandon()

    def stop(self) -> None:
        """Nothing to let go of."""
        self._mean.stop()

    def state(self) -> dict[str, Tensor]:
        """How fine lattices are, where there are any, and what participants remember."""
        kept = self.kept.state() if self.kept is not None else {}
        return {**self._mean.state(), **{KEPT + name: tensor for name, tensor in kept.items()}}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        kept = {name.removeprefix(KEPT): t for name, t in state.items() if name.startswith(KEPT)}
        self._mean.load_state({name: t for name, t in state.items() if not name.startswith(KEPT)})
        if self.kept is not None:
            self.kept.load_state(kept)
        assert self.kept is not None or not kept, "what participants remember has no place yet"

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """What a round costs; with `determinism = "bits"` twice that where lattices are new."""
        return AllReduce.price(parameter_bytes, replicas)
