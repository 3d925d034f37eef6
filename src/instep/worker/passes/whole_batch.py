"""Passes that see the global batch.

There are two kinds: one pass over all micro-batches of the worker, with batch normalisation over
the global batch (`parallel/global_batch/batch_norm.py`); and passes that embed, with a loss over
the global batch (`parallel/global_batch/cached.py`). A job may need both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from instep.data.loader import Read, Slice
from instep.data.order import Position, key
from instep.engine.engine import Engine
from instep.engine.passes import OF_PASS, Pass, Share
from instep.engine.step.agreement import Weighed
from instep.job.spec import JobSpec
from instep.parallel.global_batch.cached import CachedGradients
from instep.parallel.global_batch.reads import Reads
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Results
from instep.worker.passes.works import LoadedPass, Talking, Works, in_pass, lap


class WholeBatch(Talking):
    """Runs one worker's part of a step.

    Args:
        engine, forward: the worker's.
        works: reads its samples.
        job: says how batches are cut.
        reads: of the model, if its layers see the global batch.
        activity: told what is being done.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        works: Works,
        job: JobSpec,
        reads: Reads | None,
        activity: Activity,
    ) -> None:
        super().__init__(reads, activity)
        self._engine, self._forward, self._works, self._job = engine, forward, works, job

    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Run the passes, as `Compute.run` says."""
        clock = self._engine.clock
        self._activity.enter("forward")
        loaded = self._activity.loading(reads)
        joins = self._reads is not None
        works = self._works.of(where, share, loaded, step, clock, joins=joins)
        if self._forward.recipe.batch_loss is not None:
            losses = self._embed(where, list(works), step)
        else:
            losses = self._normed(where, works)
        return Results(losses, self._works.skipped)

    @contextmanager
    def _pass(self, work: LoadedPass) -> Iterator[None]:
        """The context of a pass, of which nothing stays unless it counts."""
        with ExitStack() as stack:
            if not work.counts:
                stack.enter_context(self._engine.passes.aside())
            stack.enter_context(in_pass(work, self._reads))
            yield

    def _lap(self, since: float, part: str) -> float:
        return lap(self._engine.clock, since, part, self._reads)

    def _normed(self, where: Position, works: Iterable[LoadedPass]) -> dict[int, Weighed]:
        """Run passes one after the other, whose layers talk in each: none is known as the last."""
        engine, reads, batch_size = self._engine, self._reads, where.size
        assert reads is not None, "an ordinary pass"
        losses = dict[int, Weighed]()
        for work in works:
            since = time.perf_counter()
            with self._pass(work):
                found = self._forward.loss(work.batch, work.size, always=True)
                assert found is not None
                factor = found.factor if work.counts and found.counts else 0.0
                if work.counts:
                    total = float(found.loss.detach()) * factor if factor else 0.0
                    losses[work.part.number] = Weighed(total, found.weight)
                since = self._lap(since, "forward")
                engine.passes.begin(work.part, 1.0, last=False)
                reads.backward(engine.turn.update.scaler.scale(found.loss), factor / batch_size)
            if work.counts:
                self._end_pass(work, batch_size)
            self._lap(since, "backward")
        return losses

    def _end_pass(self, work: LoadedPass, batch_size: int) -> None:
        kept = self._forward.kept(work.batch, work.size)
        self._engine.passes.end(work.part, kept / batch_size, left_out=work.size - kept)

    def _embed(self, where: Position, works: list[LoadedPass], step: int) -> dict[int, Weighed]:
        """Embed all that this worker has, gather, compute the loss, and go back through each."""
        engine, reads, batch_size = self._engine, self._reads, where.size
        cached = self._forward.cached(reads.backward_from if reads is not None else None)
        since = time.perf_counter()
        for work in works:
            with self._pass(work):
                if work.counts:
                    cached.embed(work.part.number, work.batch, work.size)
                else:
                    cached.join_in(on_tensors(work.batch, Tensor.clone))
            if work.counts:
                engine.passes.skip(work.part)  # only the second pass counts
        cached.gather(engine.comm, self._job.train.micro_batches, self._forward.device)
        since = self._lap(since, "forward")
        losses = dict[int, Weighed]()
        if cached.rows and any(work.counts for work in works):
            losses = self._loss_of_all(where, cached, step)
        for number, work in enumerate(works):
            with self._pass(work):
                last = number == len(works) - 1 and reads is None
                engine.passes.begin(work.part, 1.0, last=last)
                if work.counts:
                    cached.backward(work.part.number, work.batch)
                else:
                    assert reads is not None
                    cached.join_in(work.batch, record=True)
                    reads.backward(None, 0.0)
            if work.counts:
                self._end_pass(work, batch_size)
        self._lap(since, "backward")
        return losses

    def _loss_of_all(
        self, where: Position, cached: CachedGradients, step: int
    ) -> dict[int, Weighed]:
        """The loss over the global batch; only one worker's counts."""
        engine, batch_size = self._engine, where.size
        parts = self._job.train.micro_batches
        set_generators(key(self._job.seed, OF_PASS, step, parts))
        part = Pass(Slice(where.epoch, where.first, where.stop), parts)
        with ExitStack() as stack:
            if not cached.counts:
                stack.enter_context(engine.passes.aside())
            engine.passes.begin(part, 1.0, last=False)
            loss = cached.loss(engine.turn.update.scaler.scale)
        if not cached.counts:
            return {}
        engine.passes.end(part, cached.rows / batch_size, beside=True)
        return {0: Weighed(float(loss) * batch_size, float(batch_size))}
