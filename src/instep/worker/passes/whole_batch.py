"""The passes of a worker that asks others for something while it computes.

There are three kinds: one pass over all micro-batches of the worker, with batch normalisation over
the global batch (`parallel/global_batch/batch_norm.py`); passes that embed, with a loss over the
global batch (`parallel/global_batch/cached.py`); and passes of a replica that is a mesh, which all
its ranks run at the same time, in stages or each its own. A job may need several. A worker without
samples takes part with one that does not count. Ordinary passes are in `training.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from instep.data.loader import Loader, Read, Skipped, Slice
from instep.data.order import Position, key, micro_batch
from instep.engine.engine import Engine, Weighed
from instep.engine.passes import OF_PASS, Pass, Share, parts_of
from instep.job.spec import JobSpec
from instep.parallel.draws import ByMicroBatch
from instep.parallel.global_batch.reads import Reads
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.worker.passes.evaluate import first_readable
from instep.worker.replica.replica import Replica

if TYPE_CHECKING:
    from instep.parallel.pipeline.staged import Staged


class _Work(NamedTuple):
    """A pass and its samples; for a worker without work, one sample that does not count."""

    part: Pass
    batch: Any
    size: int
    keys: list[int]
    sizes: list[int]
    counts: bool


class WholeBatch:
    """Runs one worker's part of a step.

    Args:
        engine, forward, loader: the worker's.
        job: says how batches are cut.
        samples: of the training dataset.
        reads: of the model, if its layers see the global batch.
        device: where the model is.
        replica: if it is a mesh.
        parts: micro-batches of each step; as many as the job says, where it is 0.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        loader: Loader,
        job: JobSpec,
        samples: int,
        reads: Reads | None,
        device: torch.device,
        replica: Replica | None = None,
        parts: int = 0,
    ) -> None:
        self._engine, self._forward, self._loader = engine, forward, loader
        self._job, self._reads, self._device = job, reads, device
        self._borrowed: Any = None
        self._samples, self._parts = samples, parts
        self._replica = replica

    def _lap(self, since: float, part: str) -> float:
        """As `Clock.lap`; what layers have waited for other workers is no part of the pass."""
        waited = self._reads.take_waited() if self._reads is not None else 0.0
        return self._engine.clock.lap(since, part, waited)

    def run(
        self, where: Position, share: Share, loads: Iterator[Read], step: int
    ) -> tuple[dict[int, Weighed], list[Skipped]]:
        """Run this worker's passes of a step.

        Returns:
            The loss by number of the pass, and the samples that could not be read.
        """
        skipped = list[Skipped]()
        works, replica = self._works(where, share, loads, step, skipped), self._replica
        if replica is not None and replica.stages is not None:
            losses = self._staged(where, works, replica.stages, len(share.passes) - 1)
            return (losses, skipped) if replica.tells else ({}, [])
        if self._forward.recipe.batch_loss is not None:
            return self._embed(where, list(works), step), skipped
        last = len(share.passes) - 1 if self._reads is None else -1  # else layers communicate
        losses = self._plain(where, works, last)
        return (losses, skipped) if replica is None or replica.tells else ({}, [])

    def _works(
        self,
        where: Position,
        share: Share,
        loads: Iterator[Read],
        step: int,
        skipped: list[Skipped],
    ) -> Iterator[_Work]:
        """What there is to run; adds to `skipped`."""
        clock, idle = self._engine.clock, self._reads is not None
        for part in share.passes:
            since = time.perf_counter()
            read = next(loads)
            skipped += [] if part.repeats else read.skipped
            clock.lap(since, "load")
            if read.size:
                keys, sizes = self._micro_batches(where, part, read.skipped, step)
                yield _Work(part, read.batch, read.size, keys, sizes, not part.repeats)
                idle = False
            elif self._job.mesh.shard > 1:  # other ranks of the replica may have samples
                yield self._borrow(part)
                idle = False
        if idle:
            yield self._borrow(Pass(Slice(0, 0, 1), 0, repeats=True))

    def _micro_batches(
        self, where: Position, part: Pass, skipped: Sequence[Skipped], step: int
    ) -> tuple[list[int], list[int]]:
        """Key and size of each micro-batch of a pass."""
        parts = self._parts or parts_of(where, self._job.train)
        lost = {each.sample for each in skipped}
        keys, sizes = [], []
        for number in range(part.number, part.number + part.micro_batches):
            first, stop = micro_batch(where.first, where.stop, number, parts)
            indices = self._loader.indices(Slice(where.epoch, first, stop)).tolist()
            keys.append(key(self._job.seed, OF_PASS, step, number))
            sizes.append(sum(index not in lost for index in indices))
        return keys, sizes

    def _borrow(self, part: Pass) -> _Work:
        """A sample for a worker without work, which takes part in a pass and counts nothing."""
        if self._borrowed is None:
            self._borrowed = first_readable(self._loader, self._samples)
        batch = on_tensors(self._borrowed, Tensor.clone)
        return _Work(part, batch, 1, [0], [1], False)

    @contextmanager
    def _pass(self, work: _Work) -> Iterator[None]:
        """The context of a pass: its random draws, its reads, and what it leaves."""
        set_generators(work.keys[0])
        with ExitStack() as stack:
            if not (work.counts or self._replica):
                stack.enter_context(self._engine.aside())
            if len(work.keys) > 1 and self._reads is not None:
                stack.enter_context(ByMicroBatch(work.keys, work.sizes))
            if self._reads is not None:
                stack.enter_context(self._reads.one_pass(counts=work.counts))
            yield

    def _plain(self, where: Position, works: Iterable[_Work], last: int) -> dict[int, Weighed]:
        """Run passes one after the other; gradients are complete with the `last`."""
        engine, reads, batch_size = self._engine, self._reads, where.stop - where.first
        assert reads is not None or self._replica is not None, "an ordinary pass"
        losses = dict[int, Weighed]()
        for number, work in enumerate(works):
            since = time.perf_counter()
            with self._pass(work):
                found = self._forward.loss(work.batch, work.size, always=True)
                assert found is not None
                factor = found.factor if work.counts and found.counts else 0.0
                if self._replica is not None:
                    self._replica.set_counts(factor != 0.0)
                if work.counts:
                    total = float(found.loss.detach()) * factor if factor else 0.0
                    losses[work.part.number] = Weighed(total, found.weight)
                since = self._lap(since, "forward")
                engine.begin_pass(work.part, 1.0, last=number == last)
                scaled = engine.update.scaler.scale(found.loss)
                if reads is not None:
                    reads.backward(scaled, factor / batch_size)
                else:
                    (scaled * (factor / batch_size)).backward()
                if self._replica is not None:
                    self._replica.finish_pass()
            if work.counts or self._replica is not None:
                proposes = self._replica is None or self._replica.proposes
                kept = self._forward.kept(work.batch, work.size)
                if work.counts and proposes:
                    left_out = work.size - kept
                    engine.end_pass(work.part, kept / batch_size, left_out=left_out)
                else:
                    engine.end_pass(work.part, 0.0)
            self._lap(since, "backward")
        return losses

    def _staged(
        self, where: Position, works: Iterable[_Work], stages: Staged, last: int
    ) -> dict[int, Weighed]:
        """Run passes through the stages; the losses are those of the last one."""
        engine, batch_size = self._engine, where.stop - where.first
        call, losses = partial(self._forward.loss, plain=True), dict[int, Weighed]()
        for number, work in enumerate(works):
            since = time.perf_counter()
            engine.begin_pass(work.part, 1.0 / batch_size, last=number == last)
            size = work.size if work.counts else 0
            total = stages.train(work.batch, size, work.keys[0], call)
            if work.counts:
                losses[work.part.number] = Weighed(*total)
            engine.end_pass(work.part, size / batch_size)
            engine.clock.lap(since, "backward")
        return losses

    def _embed(self, where: Position, works: list[_Work], step: int) -> dict[int, Weighed]:
        engine, reads, batch_size = self._engine, self._reads, where.stop - where.first
        cached = self._forward.cached(reads.backward_from if reads is not None else None)
        since, losses = time.perf_counter(), {}
        for work in works:
            with self._pass(work):
                if work.counts:
                    cached.embed(work.part.number, work.batch, work.size)
                else:
                    cached.join_in(on_tensors(work.batch, Tensor.clone))
            if work.counts:
                engine.skip_pass(work.part)  # only the second pass counts
        cached.gather(engine.comm, self._job.train.micro_batches, self._device)
        since = self._lap(since, "forward")
        if cached.rows and any(work.counts for work in works):
            parts = self._job.train.micro_batches
            set_generators(key(self._job.seed, OF_PASS, step, parts))
            part = Pass(Slice(where.epoch, where.first, where.stop), parts)
            with ExitStack() as stack:
                if not cached.counts:
                    stack.enter_context(engine.aside())
                engine.begin_pass(part, 1.0, last=False)
                loss = cached.loss(engine.update.scaler.scale)
            if cached.counts:
                engine.end_pass(part, cached.rows / batch_size, beside=True)
                losses[0] = Weighed(float(loss) * batch_size, float(batch_size))
        for number, work in enumerate(works):
            with self._pass(work):
                last = number == len(works) - 1 and reads is None
                engine.begin_pass(work.part, 1.0, last=last)
                if work.counts:
                    cached.backward(work.part.number, work.batch)
                else:
                    assert reads is not None
                    cached.join_in(work.batch, record=True)
                    reads.backward(None, 0.0)
            if work.counts:
                kept = self._forward.kept(work.batch, work.size)
                engine.end_pass(work.part, kept / batch_size, left_out=work.size - kept)
        self._lap(since, "backward")
        return losses
