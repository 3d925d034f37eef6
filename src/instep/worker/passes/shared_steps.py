"""A local step of a participant that a replica of several processes computes together.

Each rank that splits samples passes its part of the local step's; the gradients are summed within
the replica, as in any step. What is agreed on here stays within the replica: how much the parts
weigh, the norm of the gradient, and whether the members have changed. Rounds and optimizers are not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from instep.data.loader import Loader, Read, Skipped, Slice
from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.passes import Pass, Share, part_of
from instep.engine.skipping import scale_gradients
from instep.engine.slots import give
from instep.engine.step.agreement import Weighed
from instep.engine.update import Update
from instep.errors import PeerError
from instep.job.spec import JobSpec
from instep.recipe.forward import Forward
from instep.sync.norm import norm
from instep.worker.passes.on_mesh import MeshPass
from instep.worker.passes.works import Works
from instep.worker.replica.replica import Replica


class MembersChanged(PeerError):
    """The generation is over, and this process can be in the next."""

    def __init__(self) -> None:
        super().__init__("the members have changed in the middle of a round.")


class SharedStep(NamedTuple):
    """What the passes of a local step gave; the gradients are those of the parameters."""

    found: Weighed
    """Of this rank's part."""
    size: float
    """Samples of this rank's."""
    skipped: list[Skipped]
    whole: float
    """The weight of all ranks' parts; 0 where nothing counts in the local step."""
    norm: float | None
    """Of the whole gradient, where it is wanted."""


class SharedSteps:
    """How one rank of a replica takes part in local steps.

    Args:
        engine, forward, loader: the worker's.
        update: what the gradients are for.
        job: says how samples are split.
        samples: of the training dataset.
        replica: with the model.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        loader: Loader,
        update: Update,
        job: JobSpec,
        samples: int,
        replica: Replica,
    ) -> None:
        self._engine, self._update, self._replica = engine, update, replica
        self._shard = job.mesh.shard
        self._place = job.mesh.coordinate(replica.comm.rank).shard
        self.pull: Callable[[], bool] = lambda: False
        """Adds to the gradients what is no part of the loss; whether it did."""
        self._pass = MeshPass(forward, replica, None)
        self._works = Works(loader, job, samples, self._shard)

    @property
    def tells(self) -> bool:
        """Whether this rank tells the losses of its passes, as `Replica.tells`."""
        return self._replica.tells

    def part_of(self, cut: Slice) -> Pass:
        """What this rank has of the samples of a local step."""
        return part_of(Position(*cut), self._shard, self._whole(cut), self._shard, self._place)

    def _whole(self, cut: Slice) -> Pass:
        return Pass(cut, 0, micro_batches=self._shard)

    def run(self, cut: Slice, loads: Iterator[Read], keyed: int, *, left: bool) -> SharedStep:
        """Run the passes of a local step; all ranks of the replica do so together.

        Args:
            cut: the samples of all of them.
            loads: gives this rank's next.
            keyed: what the draws are keyed by, before the rank.
            left: whether this rank knows that the members have changed.

        Raises:
            MembersChanged: one of the ranks knows that.
            PeerError: another rank of this replica was lost.
        """
        part, engine, size = self.part_of(cut), self._engine, cut.stop - cut.first
        share = Share([part], part.samples.first, part.samples.stop)
        losses, given, clock = dict[int, Weighed](), 0.0, engine.clock
        for work in self._works.of(Position(*cut), share, loads, keyed, clock, joins=False):
            ran = self._pass.run(work, size, clock, engine.turn.update.scaler)
            losses |= ran.losses
            given += ran.share
            clock.lap(ran.since, "backward")
        if not self._replica.tells:
            losses = {}
        own = next(iter(losses.values()), Weighed(0.0, 0.0))
        comm, squares = self._replica.comm, engine.turn.squares() if self._update.clips else 0.0
        told = torch.zeros(2 + comm.size, dtype=torch.float64, device=engine.turn.slots[0].device)
        told[0], told[1], told[2 + comm.rank] = own.weight, float(left), squares
        comm.all_reduce(told).wait()
        whole, gone, *every = told.tolist()
        if gone:
            raise MembersChanged
        scale = self._pass.weight(size) * size / (whole or 1.0)
        scale_gradients(engine.turn.slots, scale)
        found = norm(every) * scale if self._update.clips else None
        if self.pull() and self._update.clips:
            found = self._norm()
        give(engine.turn.slots, engine.parameters)
        skipped = self._works.skipped if self._replica.tells else []
        return SharedStep(own, given * size, skipped, whole, found)

    def _norm(self) -> float:
        """Of the whole gradient."""
        comm, turn = self._replica.comm, self._engine.turn
        every = torch.zeros(comm.size, dtype=torch.float64, device=turn.slots[0].device)
        every[comm.rank] = turn.squares()
        comm.all_reduce(every).wait()
        return norm(every.tolist())
