"""The exchange of a step: gradients by the strategy, and notes of all workers about the step.

It knows neither what is staged, nor when a step is committed. Way in: `StepExchange.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.engine.member import Member
from instep.engine.observers import Observer
from instep.engine.skipping import share_read
from instep.engine.state.buffers import Buffers
from instep.engine.state.copied_commits import CopiedCommits
from instep.engine.step.agreement import (
    Agreement,
    Weighed,
    agreement,
    notes_of_a_step,
    refuse_unequal_ends,
)
from instep.engine.turns import TurnState
from instep.errors import Unrepeatable
from instep.sync.norm import norm


class Exchanged(NamedTuple):
    """Outcome of an exchange; the same on every worker, but for `waited`."""

    agreed: Agreement
    read: float
    """The share of the global batch that was read."""
    buffers: list[float]
    """Who has moved each."""
    computing: list[float]
    """How long each rank's passes took, seconds."""
    waited: float
    """From when this worker had done its passes until the last one had, seconds."""


class StepExchange:
    """Exchanges the steps of one generation.

    Args:
        member: this worker's membership in the run.
        comm: the members of the generation.
        turns: the updates of a step.
        parts: micro-batches of a step.
        buffers, observers, copies: have notes of their own.
    """

    def __init__(
        self,
        member: Member,
        comm: Comm,
        turns: Sequence[TurnState],
        parts: int,
        buffers: Buffers,
        observers: Mapping[str, Observer],
        copies: CopiedCommits | None,
    ) -> None:
        self._member, self._comm, self._ranks = member, comm, member.job.mesh.ranks
        self._buffers, self._observers, self._copies = buffers, observers, copies
        self._measures = self._ranks > 1 and any(turn.update.clips for turn in turns)
        self._notes = notes_of_a_step(
            comm.size,
            parts,
            buffers=len(buffers),
            squares=self._ranks if self._measures else 0,
            meshed=self._ranks > 1,
            uncopied=len(copies.notes) if copies is not None else 0,
            **{name: observer.size for name, observer in observers.items()},
        )
        self.notes = 0 if self._ranks > 1 else self._notes.size
        """How many numbers travel with the gradients."""
        self._base = member.started  # Unix seconds, the same in every worker

    def run(
        self,
        turn: TurnState,
        passes: Mapping[int, Weighed],
        whole: int,
        *,
        arrived: float,
        computing: float,
        **own: float,
    ) -> Exchanged | None:
        """Exchange what the passes gave.

        Args:
            turn: the one whose gradients they gave.
            passes: number of each of this worker's passes to what it gave.
            whole: samples of the global batch; 0 where all leave.
            arrived: when this worker had done its passes, in Unix seconds.
            computing: how long they took, seconds.
            own: further notes of this worker, of one number each.

        Returns:
            None where all must run their passes once more.

        Raises:
            InstepError: as from `Engine.agree`.
        """
        notes, rank = self._notes.blank(), self._comm.rank
        notes |= {name: [float(each)] for name, each in own.items()}
        notes["regroups"] = [float(self._member.regroups)]
        notes["arrived"][rank], notes["computing"][rank] = arrived - self._base, computing
        for number, (total, weight) in passes.items():
            notes["losses"][number], notes["weights"][number] = total, weight
        notes["buffers"] = self._buffers.marks()
        if self._copies is not None:
            notes["uncopied"] = self._copies.notes
        for name, observer in self._observers.items():
            notes[name] = observer.notes()
        summed = self._exchange(turn, notes)
        if summed is None:
            return None
        said = self._notes.unpack(summed)
        refuse_unequal_ends(said["leaving"][0], self._comm.size)
        for name, observer in self._observers.items():
            observer.judge(said[name])
        if self._copies is not None:
            self._copies.judge(said["uncopied"], self._comm)
        agreed = agreement(said, whole, norm(said["squares"]) if self._measures else None)
        read = share_read(agreed.skipped, whole, round(said["left_out"][0]))
        self._base += max(said["arrived"])
        waited = max(0.0, self._base - arrived)
        return Exchanged(agreed, read, said["buffers"], said["computing"], waited)

    def _exchange(self, turn: TurnState, notes: dict[str, list[float]]) -> Tensor | None:
        """Exchange gradients and notes; what the strategy's `exchange` returns.

        On a mesh the strategy knows one rank of each replica. Notes are for all ranks, and each
        adds what it has of the norm.
        """
        whole = self._ranks == 1
        try:
            packed = self._notes.pack(notes) if whole else torch.zeros(0, dtype=torch.float64)
            found = turn.strategy.exchange(packed)
        except Unrepeatable as error:
            for observer in self._observers.values():
                observer.unrepeatable(error)
            raise
        if whole:
            return found
        fits = found is not None
        replica, place = divmod(self._comm.rank, self._ranks)
        if not fits:
            notes["again"] = [1.0]
        elif self._measures:
            turn.fill_slots()
        if fits and self._measures and replica == 0:
            notes["squares"][place] = turn.squares()
        summed = self._notes.pack(notes)
        self._comm.all_reduce(summed).wait()
        if not self._notes.unpack(summed)["again"][0]:
            return summed
        if fits:  # elsewhere they did not, so that this step begins again
            turn.strategy.abandon()
        turn.forget()
        return None
