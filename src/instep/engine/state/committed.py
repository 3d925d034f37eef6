"""What one worker holds between steps: the state of the last commit, and how it gets a newer one.

A generation begins either from a checkpoint, for all, or from what its members
hold: then the highest commit counts (`catch_up.py`), and a worker that lacks it copies
the state from a peer's memory. How a step comes about, this file does not know.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.order import Position
from instep.engine.state.average import Average
from instep.engine.state.capture import CommitProgress, Moved, capture, read_checkpoint, restore
from instep.engine.state.catch_up import NOWHERE, Beginning, HeldCommit, beginning
from instep.engine.trial_result import Trial
from instep.recipe.optimizers.two_points import TwoPoints
from instep.records import Attempt
from instep.state import broadcast
from instep.state.boxes import MeshRank
from instep.state.files.manifest import AVERAGE
from instep.state.packing import pack_state, unpack_state
from instep.state.snapshot import Snapshot

_REMEMBERED = 256
"""Generations of which the last commit is known."""


class Commit(NamedTuple):
    """A step that counts, as far as what follows it must know."""

    step: int
    loss: float
    """Mean over the global batch."""
    norm: float | None
    """Of the agreed gradient, where it was computed."""
    told: bool
    """Whether the workers were told to stop."""
    ends: bool
    """Whether this start of the run ends with it."""
    skipped: int = 0
    """Samples of it that could not be read."""
    saves: bool = False
    """Whether the worker that saves wants a checkpoint of it, because its time has come."""
    losses: tuple[float, ...] = ()
    """Of each turn, where a step has several."""


class CommittedState:
    """The state of the last commit.

    Args:
        model: as the recipe builds it.
        turns: the updates of a step, with optimizers as the recipe makes them.
        rank: of a replica that is a mesh; None where one process has all of it.
    """

    def __init__(
        self, model: nn.Module, turns: Sequence[Moved], rank: MeshRank | None = None
    ) -> None:
        self._model, self._turns, self._each = model, list(turns), len(turns)
        self._rank = rank
        self._device = next(model.parameters()).device
        self.trial: Trial | None = None
        """Whether cutting a batch changes the result; a newcomer is given it by its peers."""
        self.progress = CommitProgress()
        self.last: Commit | None = None
        """Of this session; None before its first step."""
        self.rows: Sequence[tuple[int, ...]] = ()
        """Records of that step in the ledger, so that another process can write what its writer has
        not."""
        self.settled = 0
        """Up to which step what follows a commit has been done by every member."""
        self.ended = False
        """Whether a rule ended the run at the checkpoint that it went back to."""
        self.generation = -1
        """The newest that this worker was inside; 0 where it was in none, and was given the state
        by a peer; -1 where it holds only what a fresh process does."""
        self.own: Mapping[str, Tensor] = {}
        """What a checkpoint holds of state that one worker alone had, as `KIND/PARAMETER`."""
        self.tried = -1
        """The newest generation that it has begun to form with the state that it holds."""
        self.owners: tuple[int, ...] = ()
        """Workers of the newest generation that any state of their own may be of."""
        self.average: Average | None = None
        """Of the parameters, if the job wants one."""
        self.two_points: TwoPoints | None = None
        """Where the optimizer gives its result at another point than it trains at."""
        self._made: dict[int, tuple[int, int]] = {}  # by generation: course and last commit in it

    @property
    def held(self) -> bool:
        """Whether this is the state of the run, and not that of a fresh process."""
        return self.generation >= 0

    @property
    def over(self) -> bool:
        """Whether no further step comes."""
        return self.ended or (self.last is not None and self.last.ends)

    def end(self) -> None:
        """End this start of the run with the last commit, as the workers were told."""
        if self.last is None:  # of a step before this start of the run
            self.ended = True
        else:
            self.last = self.last._replace(told=True, ends=True)

    @property
    def lost(self) -> list[str]:
        """Attributes of optimizers and schedulers that no snapshot has, and that were others where
        this state is from."""
        return [name for each in self._turns for name in each.update.lost]

    @property
    def number(self) -> int:
        """Of the last commit: that of its step; turns are numbered on, where a step has several."""
        return self.progress.step * self._each + len(self.progress.turns)

    def capture(self, moved: Container[int] | None = None) -> Snapshot:
        """Everything of the last commit that the next step builds on; see `capture.capture`."""
        own = capture(self.progress, self._model, self._turns, moved=moved, rank=self._rank)
        if self.average is not None and self.average.state():
            own.tensors[AVERAGE] = self.average.state()
        elif self.average is None and self.two_points:
            own.tensors[AVERAGE] = self.two_points.values()  # for those who use the checkpoint
        return own

    def averaged(self) -> AbstractContextManager[None]:
        """In this context the model has the moving average of its parameters, if there is one; or
        is at the point of the optimizer's result."""
        return self.average.in_place() if self.average is not None else self._evaluated()

    def _evaluated(self) -> AbstractContextManager[None]:
        return self.two_points.evaluated() if self.two_points else nullcontext()

    def restore(self, snapshot: Snapshot, source: object) -> None:
        """Be at another commit, as `capture` gave it.

        Args:
            snapshot: of that commit.
            source: where it is from, for messages.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        self.progress = restore(snapshot, source, self._model, self._turns, rank=self._rank)
        if self.average is not None:
            self.average.load(snapshot.tensors.get(AVERAGE, {}))

    def load(
        self, checkpoint: Path | None, *, ends: bool = False, lent: Snapshot | None = None
    ) -> None:
        """Take the state of a checkpoint, which another machine may lend, or of a beginning.

        Raises:
            CheckpointError: it cannot be read, or is of another model or optimizer.
        """
        snapshot = read_checkpoint(checkpoint, self._model, self._turns, rank=self._rank, lent=lent)
        self.progress, self.own = CommitProgress(), {}
        if snapshot is not None:
            self.restore(snapshot, checkpoint)
            self.own = snapshot.tensors.get("own", {})
        self.last, self.rows = None, ()
        self.settled, self.ended = self.progress.step, ends

    def copy(self, comm: Comm, root: int, *, mine: bool) -> None:
        """Members that could not load what the others have just loaded copy it from rank `root`;
        every member calls it.

        Args:
            mine: whether this one has loaded it.

        Raises:
            PeerError: a member went away meanwhile.
        """
        own = self.capture() if comm.rank == root else None
        taken = broadcast.broadcast_snapshot(own, comm, root, self._device)
        if not mine:
            self.restore(taken, "a peer's checkpoint")
            self.settled = self.progress.step

    def inside(self, generation: int) -> None:
        """The steps of a generation are about to begin."""
        self.generation = generation
        self._made[generation] = self.progress.course, self.number
        while len(self._made) > _REMEMBERED:
            del self._made[min(self._made)]

    def happened(self, attempt: Attempt) -> bool:
        """Whether a commit happened that was prepared so; it may have been abandoned since."""
        course, last = self._made.get(attempt.generation, (-1, -1))
        return attempt.course == course and attempt.number <= last

    def compare(self, comm: Comm, *, prepared: int, start_in_doubt: int) -> Beginning:
        """From which commit all members continue; every member calls it.

        Args:
            comm: the members.
            prepared: number of the commit that this one has voted for without an answer; -1 for
                none.
            start_in_doubt: the generation whose start it has voted for without an answer; -1 for
                none.

        Raises:
            PeerError: a member went away, or none has the state.
        """
        mine, last = NOWHERE, self.last
        if self.held:
            told, ends = (last.told, last.ends) if last else (self.ended, self.ended)
            mine = HeldCommit(
                self.progress.course,
                self.number,
                prepared,
                self.generation,
                self.settled * self._each,
                told=told,
                ends=ends,
                tried=self.tried,
                start_in_doubt=start_in_doubt,
            )
        table = torch.zeros(comm.size, len(mine), dtype=torch.int64, device=self._device)
        table[comm.rank] = torch.tensor(mine)
        comm.all_reduce(table).wait()
        there = beginning([HeldCommit(*row) for row in table.tolist()])
        if there.generation >= 0:
            self._made[there.generation] = there.course, there.number
        return there

    def share(self, comm: Comm, there: Beginning) -> None:
        """Give the commit of rank `there.root` to the members that lack it; every member calls it.

        Raises:
            PeerError: a member went away meanwhile.
        """
        if there.shared:
            self._share(comm, there)
        if self.last is not None:
            told, ends = self.last.told or there.told, self.last.ends or there.ends
            self.last = self.last._replace(told=bool(told), ends=bool(ends))
        self.ended = self.last is None and bool(there.ends)
        self.settled = there.settled // self._each

    def _share(self, comm: Comm, there: Beginning) -> None:
        own = self.for_another() if comm.rank == there.root else None
        taken = broadcast.broadcast_snapshot(own, comm, there.root, self._device)
        if not self.held or (self.progress.course, self.number) != there[:2]:
            self.take(taken, "a peer's state")

    def for_another(self) -> Snapshot:
        """All that another process needs to be where this one is; its tensors are the live ones."""
        own = self.capture()
        own.facts["last"] = pack_state(list(self.last or ()))[1]
        own.facts["rows"] = [list(row) for row in self.rows]
        own.facts["trial"] = list(self.trial or ())
        own.facts["owners"] = list(self.owners)
        own.facts["made"] = [[g, *made] for g, made in self._made.items()]
        return own

    def take(self, taken: Snapshot, source: str) -> None:
        """Be where another process was, which gave `for_another`.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        self.restore(taken, source)
        last = unpack_state({}, taken.facts["last"])
        self.last = Commit(*last) if last else None
        self.rows = [tuple(row) for row in taken.facts["rows"]]
        self._made = {g: (course, step) for g, course, step in taken.facts["made"]}
        self.trial = Trial(*taken.facts["trial"]) if taken.facts["trial"] else None
        self.owners = tuple(taken.facts["owners"])
        self.generation = max(self.generation, 0)  # its giver may be gone before the first step

    def commit(self, done: Commit, where: Position, rows: Sequence[tuple[int, ...]] = ()) -> None:
        """A step counts, at this place in the data; or one of its turns that is not the last.

        Args:
            done: the step, or turn.
            where: its samples.
            rows: of the step, in the ledger.
        """
        count, before = where.size - done.skipped, self.progress
        loss, samples = (before.epoch_loss, before.epoch_samples) if where.first else (0.0, 0)
        if len(before.turns) < self._each - 1:
            self.progress = before._replace(turns=(*before.turns, done.loss))
        else:
            self.last, self.rows = done, rows
            if self.average is not None:
                with self._evaluated():
                    self.average.update()
            self.progress = before._replace(
                step=done.step,
                epoch_loss=loss + done.loss * count,
                epoch_samples=samples + count,
                turns=(),
            )
        self._made[self.generation] = before.course, self.number
