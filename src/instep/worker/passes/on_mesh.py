"""Passes of a replica that is a mesh, which all its ranks run at the same time.

`MeshPass` runs one of them, in stages or on each rank its own, and knows no engine: gradients of a
step go to one (`OnMesh`), those of a local step stay within the replica (`shared_steps.py`), and of
what is only tried nothing stays (`mesh_trial/gradients.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from instep.data.loader import Read
from instep.data.order import Position
from instep.engine.clock import Clock
from instep.engine.engine import Engine
from instep.engine.passes import Share
from instep.engine.step.agreement import Weighed
from instep.parallel.global_batch.reads import Reads
from instep.recipe.forward import Forward
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Results
from instep.worker.passes.works import LoadedPass, Talking, Works, in_pass, lap
from instep.worker.replica.replica import Replica

if TYPE_CHECKING:
    from instep.parallel.pipeline.staged import Staged


class Ran(NamedTuple):
    """Results of one pass."""

    losses: dict[int, Weighed]
    """By its number; nothing where it does not count."""
    share: float
    """Its part of the samples that move buffers."""
    left_out: int
    """Samples that the user's `collate` left out."""
    since: float
    """When its backward pass began, by `perf_counter`."""


class MeshPass:
    """Runs this rank's passes; the gradients come to lie in the slots of its parameters.

    Args:
        forward: the worker's.
        replica: with the model.
        reads: of the model, if its layers see the global batch.
    """

    def __init__(self, forward: Forward, replica: Replica, reads: Reads | None) -> None:
        self._forward, self.replica, self.reads = forward, replica, reads

    def weight(self, batch_size: int) -> float:
        """Factor by which the gradients of a pass are still to be multiplied."""
        return 1.0 / batch_size if self.replica.stages is not None else 1.0

    def run(
        self,
        work: LoadedPass,
        batch_size: int,
        clock: Clock,
        scaler: torch.amp.GradScaler | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Ran:
        """Run a pass over the samples of a batch of this size.

        Args:
            begin: called before the first gradient.

        Raises:
            PeerError: another rank was lost.
        """
        if self.replica.stages is not None:
            return self._staged(work, batch_size, self.replica.stages, begin)
        scale = scaler.scale if scaler is not None else (lambda loss: loss)
        since, reads, replica = time.perf_counter(), self.reads, self.replica
        losses = dict[int, Weighed]()
        with in_pass(work, reads):
            found = self._forward.loss(work.batch, work.size, always=True)
            assert found is not None
            factor = found.factor if work.counts and found.counts else 0.0
            replica.set_counts(factor != 0.0)
            if work.counts:
                total = float(found.loss.detach()) * factor if factor else 0.0
                losses[work.part.number] = Weighed(total, found.weight)
            since = lap(clock, since, "forward", reads)
            begin()
            if reads is not None:
                reads.backward(scale(found.loss), factor / batch_size)
            else:
                (scale(found.loss) * (factor / batch_size)).backward()
            replica.finish_pass()
        kept = self._forward.kept(work.batch, work.size)
        if work.counts and replica.proposes:
            return Ran(losses, kept / batch_size, work.size - kept, since)
        return Ran(losses, 0.0, 0, since)

    def _staged(
        self, work: LoadedPass, batch_size: int, stages: Staged, begin: Callable[[], None]
    ) -> Ran:
        """Run a pass through the stages; the losses are those of the last one."""
        since, call = time.perf_counter(), partial(self._forward.loss, plain=True)
        begin()
        size = work.size if work.counts else 0
        total = stages.train(work.batch, size, work.keys[0], call)
        losses = {work.part.number: Weighed(*total)} if work.counts else {}
        return Ran(losses, size / batch_size, 0, since)


class OnMesh(Talking):
    """Runs one rank's passes of a step.

    Args:
        engine: the worker's.
        passes: runs each.
        works: reads its samples.
        activity: told what is being done.
    """

    def __init__(
        self,
        engine: Engine,
        passes: MeshPass,
        works: Works,
        activity: Activity,
    ) -> None:
        super().__init__(passes.reads, activity)
        self._engine, self._passes, self._works = engine, passes, works
        self._replica = passes.replica

    def samples(self, share: Share) -> int:
        """Count as `Dealt.samples`; of the processes that have the same batch, one tells them."""
        return super().samples(share) if self._replica.tells else 0

    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Run the passes, as `Compute.run` says."""
        engine, clock, batch_size = self._engine, self._engine.clock, where.size
        self._activity.enter("forward")
        loaded, talks = self._activity.loading(reads), self._reads is not None
        losses, weight = dict[int, Weighed](), self._passes.weight(batch_size)
        # where layers communicate, others may yet ask after the last pass
        last = -1 if talks and self._replica.stages is None else len(share.passes) - 1
        works = self._works.of(where, share, loaded, step, clock, joins=talks)
        for number, work in enumerate(works):
            begin = partial(engine.passes.begin, work.part, weight, last=number == last)
            ran = self._passes.run(work, batch_size, clock, engine.turn.update.scaler, begin)
            losses |= ran.losses
            engine.passes.end(work.part, ran.share, left_out=ran.left_out)
            lap(clock, ran.since, "backward", self._reads)
        if self._reads is not None and self._reads.failed is not None:
            raise self._reads.failed
        return Results(losses, self._works.skipped) if self._replica.tells else Results({}, [])
