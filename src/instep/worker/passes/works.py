"""Passes with their samples, for workers that ask others for something while they compute.

All of them run as many passes at a time as the others, so one without work takes part with a sample
that does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from instep.comm.base import Comm
from instep.data.loader import Loader, Read, Skipped, Slice
from instep.data.order import Position, key
from instep.engine.clock import Clock
from instep.engine.passes import OF_PASS, Pass, Share, parts_of
from instep.job.spec import JobSpec
from instep.parallel.draws import ByMicroBatch
from instep.parallel.global_batch.reads import Reads
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute
from instep.worker.passes.evaluate import first_readable


class LoadedPass(NamedTuple):
    """A pass and its samples; for a worker without work, one sample that does not count."""

    part: Pass
    batch: Any
    size: int
    keys: list[int]
    sizes: list[int]
    counts: bool


class Works:
    """Reads the samples of passes, and borrows one where there are none.

    Args:
        loader: of the training dataset.
        job: says how batches are cut.
        samples: of the training dataset.
        parts: micro-batches of each step; as many as the job says, where it is 0.
    """

    def __init__(self, loader: Loader, job: JobSpec, samples: int, parts: int = 0) -> None:
        self._loader, self._job, self._samples, self._parts = loader, job, samples, parts
        self._borrowed: Any = None
        self.skipped = list[Skipped]()
        """Samples of the last `of` that could not be read."""

    def of(
        self,
        where: Position,
        share: Share,
        reads: Iterator[Read],
        step: int,
        clock: Clock,
        *,
        joins: bool,
    ) -> Iterator[LoadedPass]:
        """The passes of a step, each once its samples are there.

        Args:
            where, share, reads, step: as for `Compute.run`.
            clock: counts the seconds of loading.
            joins: whether a worker without any work runs one pass nevertheless.
        """
        self.skipped = []
        for part in share.passes:
            since = time.perf_counter()
            read = next(reads)
            self.skipped += [] if part.repeats else read.skipped
            clock.lap(since, "load")
            if read.size:
                keys, sizes = self._micro_batches(where, part, read.skipped, step)
                yield LoadedPass(part, read.batch, read.size, keys, sizes, not part.repeats)
                joins = False
            elif self._job.mesh.shard > 1:  # other ranks of the replica may have samples
                yield self._borrow(part)
                joins = False
        if joins:
            yield self._borrow(Pass(Slice(0, 0, 1), 0, repeats=True))

    def _micro_batches(
        self, where: Position, part: Pass, skipped: Sequence[Skipped], step: int
    ) -> tuple[list[int], list[int]]:
        """Key and size of each micro-batch of a pass."""
        parts = self._parts or parts_of(where, self._job.train)
        lost = {each.sample for each in skipped}
        keys, sizes = [], []
        for number in range(part.number, part.number + part.micro_batches):
            first, stop = where.micro_batch(number, parts)
            indices = self._loader.indices(Slice(where.epoch, first, stop)).tolist()
            keys.append(key(self._job.seed, OF_PASS, step, number))
            sizes.append(sum(index not in lost for index in indices))
        return keys, sizes

    def _borrow(self, part: Pass) -> LoadedPass:
        """A sample for a worker without work, which takes part in a pass and counts nothing."""
        if self._borrowed is None:
            self._borrowed = first_readable(self._loader, self._samples)
        batch = on_tensors(self._borrowed, Tensor.clone)
        return LoadedPass(part, batch, 1, [0], [1], False)


class Talking(Compute):
    """Runs passes of a model whose layers may ask other workers for the global batch.

    Args:
        reads: of the model, if its layers do.
        activity: told what is being done.
    """

    def __init__(self, reads: Reads | None, activity: Activity) -> None:
        self._reads, self._activity = reads, activity
        self.whole = reads is not None

    def begin(self, comm: Comm) -> None:
        """Let layers ask these members."""
        if self._reads is not None:
            self._reads.join(comm, self._activity.waiting)


@contextmanager
def in_pass(work: LoadedPass, reads: Reads | None) -> Iterator[None]:
    """The context of a pass: its random draws, and what its layers ask of other workers."""
    set_generators(work.keys[0])
    with ExitStack() as stack:
        if len(work.keys) > 1 and reads is not None:
            stack.enter_context(ByMicroBatch(work.keys, work.sizes))
        if reads is not None:
            stack.enter_context(reads.one_pass(counts=work.counts))
        yield


def lap(clock: Clock, since: float, part: str, reads: Reads | None) -> float:
    """Count as `Clock.lap`; what layers have waited for others is no part of the pass."""
    return clock.lap(since, part, reads.take_waited() if reads is not None else 0.0)
