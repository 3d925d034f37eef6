"""Facts that a strategy is told when a generation begins; what of them outlives a process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.records import BEGINNING, Attempt


class Memory(Protocol):
    """Two slots of named tensors that outlive the process: of one commit, and of the next."""

    def lay_out(self, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Say which tensors `stage` gives: shape and type by name."""

    def stage(self, course: int, number: int, generation: int) -> dict[str, Tensor]:
        """The tensors in which to write the state of a commit; they hold anything."""

    def staged(self, course: int, number: int, generation: int) -> None:
        """All that was to be written for this commit is."""

    def at(self, course: int, number: int, generation: int) -> dict[str, Tensor] | None:
        """What was staged for exactly this commit; None if no slot holds it."""

    def stamps(self) -> Sequence[tuple[int, int, int]]:
        """The commits of which there is something, the newest first."""

    def forget(self, course: int, number: int, generation: int) -> None:
        """What was staged for this commit is of no use."""

    def lasting(self, size: int) -> Tensor:
        """[size] uint8 that belongs to no commit; as the process before has left it."""


class Piece(NamedTuple):
    """A part of a parameter, as its elements lie one after the other."""

    slot: int
    start: int
    stop: int


SERVED = "served"
"""Among what an optimizer has for a parameter, in a checkpoint: the parameter as its servers have
it, where workers hold another."""


@runtime_checkable
class Mover(Protocol):
    """The optimizer, for strategies that have it on servers: it moves pieces of parameters."""

    @property
    def clips(self) -> bool:
        """Whether it wants the norm of the gradient."""

    @property
    def by_element(self) -> bool:
        """Whether a piece moves as it would within its parameter; else only whole parameters do."""

    held: Mapping[Piece, Parameter]
    """What it moves here."""

    def hold(self, pieces: Mapping[Piece, Parameter]) -> None:
        """From now on these are what it moves here, and it keeps state for nothing else. State
        that it has for the parameters themselves is cut; `SERVED` among it is put into them."""

    def limit(self, squares: Tensor) -> float:
        """Take in the squares of all gradients (`norm.squares`); what to multiply them by."""

    def step(self, number: int, pieces: Collection[Piece]) -> None:
        """Move some of the pieces by their `.grad`; in one step each once."""

    def states(self) -> dict[str, Tensor]:
        """What it keeps for the pieces, as `SLOT/NAME/START:STOP`: the tensors themselves."""

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Take up copies of what `states` gave, in place of what it keeps."""


class Servers(NamedTuple):
    """Ranks without passes, each of which moves a part of the parameters for all."""

    ranks: Sequence[int]
    mover: Mover


@runtime_checkable
class Scattered(Protocol):
    """A strategy in which a server has the newest values of its own part of the parameters only."""

    whole: bool
    """Whether this rank has all of the last commit."""

    def make_whole(
        self, comm: Comm, root: int, servers: Sequence[int], memory: Memory | None
    ) -> None:
        """Only servers are left that have the last commit, and one of them is to give it to the
        others: the rest give it their parts before. Every rank calls it, before `start`.

        Args:
            comm: the ranks of the next generation.
            root: the rank that is to have all.
            servers: ranks.
            memory: of this rank; what the process before left may be there.

        Raises:
            WorkerError: the part of a server is lost.
            PeerError: a rank went away.
        """


class InMesh(NamedTuple):
    """What a rank must know of the others of its replica."""

    everyone: Comm
    """All ranks of the run. What is laid out counts once all of them have laid out theirs."""
    holders: Sequence[tuple[int, ...]]
    """For each parameter, the ranks of the replica that have the same of it. They must be handed
    out the same bits, each by its own group."""


class Generation(NamedTuple):
    """What a strategy is told when a generation begins."""

    notes: int
    """Length of the vector that will travel with every step."""
    parts: int = 0
    """0 for sums that are equal to rounding. Above it, the agreed gradient must have the same bits
    however the passes are dealt to ranks; a step has at most so many over all ranks, each with at
    most about its share of the weight."""
    memory: Memory | None = None
    """For what this rank alone remembers; outlives the process. What is staged for a step lies
    there, stamped, before the message without which no other rank can finish the exchange."""
    at: Attempt = BEGINNING
    """The commit that all hold, in this generation."""
    draining: Sequence[int] = ()
    """Ranks that leave after it: what they alone remember, others take over now, or nobody does;
    which of the two, `Strategy.resolve` says after a PeerError."""
    servers: Servers | None = None
    """The ranks that are; for strategies that have some."""
    mesh: InMesh | None = None
    """Where a strategy's `comm` has one rank of each replica, and a replica has several."""

    def everyone(self, comm: Comm) -> Comm:
        """All ranks of the run, of which `comm` has one of each replica."""
        return self.mesh.everyone if self.mesh is not None else comm
