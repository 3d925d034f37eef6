"""Where a worker stands in its run: the last commit it has, and how it comes by a later one.

A generation begins either from a checkpoint, for all, or with what its members
hold: then the highest committed step counts, and whoever is new, or missed
the last commit, takes the state from the memory of one that has it. What is
carried from step to step beside model and optimizer lives here. How a step
comes about, this file does not know.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from instep.comm.base import Comm
from instep.data.order import Position
from instep.state import broadcast
from instep.state.packing import pack_state, unpack_state
from instep.store.ledger import mend
from instep.worker.catch_up import NOWHERE, Place, beginning
from instep.worker.member import Member
from instep.worker.replica import Replica
from instep.worker.sameness import Trial
from instep.worker.saving import TakenUp, aside, gather, take_up, taken_up
from instep.worker.update import Update


class Committed(NamedTuple):
    """The last commit, as far as what follows it must know."""

    step: int
    loss: float
    norm: float | None
    """Of the agreed gradient, where it was computed."""
    told: bool
    """Whether the workers were told to stop."""
    ends: bool
    """Whether this start of the run ends with it."""
    skipped: int = 0
    """Samples of it that could not be read."""


class Standing:
    """The state that one worker holds, between steps.

    Args:
        member: its connection to the run.
        model: as the recipe builds it.
        update: with the optimizer as the recipe makes it.
    """

    def __init__(self, member: Member, model: nn.Module, update: Update) -> None:
        self._member, self._model, self._update = member, model, update
        self._device = next(model.parameters()).device
        self.trial: Trial | None = None
        """Whether cutting a batch changes the result; a newcomer is told by the others."""
        self.carried = TakenUp()
        self.last: Committed | None = None
        """Of this session; None before its first step."""
        self.settled = 0
        """Up to which step what follows a commit has been done by every member."""
        self.ended = False
        """Whether a rule had the run end with the checkpoint that it went back to."""
        self._holds = False  # the state of the run, not that of a fresh process
        self._shares: list[tuple[int, ...]] = []

    def begin(self, comm: Comm) -> bool:
        """Take up the state that a generation begins with; every member calls it.

        Returns:
            Whether a peer gave its state to somebody.

        Raises:
            CheckpointError: the checkpoint to begin from cannot be taken up.
            PeerError: a member went away meanwhile.
        """
        form = self._member.form
        assert form is not None, "no generation yet"
        if form.checkpoint is None:
            return self._catch_up(comm)
        if self._holds and not form.checkpoint:
            # only a fresh process has the state of a beginning; another will take this one's place
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint = Path(form.checkpoint) if form.checkpoint else None
        self.carried = taken_up(checkpoint, self._model, self._update)
        self.last, self.settled, self.ended = None, self.carried.step, form.ends
        return False

    def _catch_up(self, comm: Comm) -> bool:
        last = self.last
        mine = NOWHERE
        if self._holds:
            told, ends = (last.told, last.ends) if last else (self.ended, self.ended)
            mine = Place(self.carried.step, self.settled, told, ends)
        table = torch.zeros(comm.size, len(mine), dtype=torch.int64, device=self._device)
        table[comm.rank] = torch.tensor(mine)
        comm.all_reduce(table).wait()
        there = beginning([Place(*row) for row in table.tolist()])
        if comm.rank == there.root:
            ledger = self._member.run / "ledger.bin"
            mend(ledger, there.step, self._shares, wait=self._member.waits_for_writer)
        if there.shared:
            self._share(comm, there.root)
        if self.last is not None:
            self.last = self.last._replace(told=bool(there.told), ends=bool(there.ends))
        self.ended = self.last is None and bool(there.ends)
        self.settled = there.settled
        return there.shared

    def _share(self, comm: Comm, root: int) -> None:
        """Give the root's state to all, or take it."""
        own = None
        if comm.rank == root:
            own = gather(self.carried, self._model, self._update)
            own.tensors["aside"] = aside(self._model, own.tensors["model"])
            own.facts["last"] = pack_state(list(self.last or ()))[1]
            own.facts["trial"] = list(self.trial or ())
        taken = broadcast.broadcast_snapshot(own, comm, root, self._device)
        if comm.rank == root or (self._holds and taken.step == self.carried.step):
            return
        self.carried = take_up(taken, "a peer's state", self._model, self._update)
        last = unpack_state({}, taken.facts["last"])
        self.last = Committed(*last) if last else None
        self.trial = Trial(*taken.facts["trial"]) if taken.facts["trial"] else None

    def formed(self) -> None:
        """The group holds together: this worker is one of those who have the state."""
        self._holds = True
        self._member.formed()

    def commit(self, done: Committed, where: Position) -> Committed:
        """A step counts, at this place in the data; gives it back."""
        count, before = where.stop - where.first - done.skipped, self.carried
        loss, samples = (before.epoch_loss, before.epoch_samples) if where.first else (0.0, 0)
        self.last = done
        self.carried = before._replace(
            step=done.step, epoch_loss=loss + done.loss * count, epoch_samples=samples + count
        )
        return done

    def leave(self, replica: Replica) -> None:
        """The group has come apart: keep what was committed, undo the rest."""
        self._shares = replica.shares() or self._shares
        self.carried = self.carried._replace(strategy=replica.strategy.state())
        replica.abandon()
        replica.close()
