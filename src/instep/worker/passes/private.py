"""Private passes: the clipped gradients of single samples, on the grid, summed by micro-batch.

No loss of a sample or step is told to anybody: what a private step publishes is its sum with noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from instep.data.loader import Read
from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.passes import Pass, Share
from instep.engine.step.agreement import Weighed
from instep.engine.turns import key_of_pass
from instep.errors import PeerError
from instep.privacy.gradients.per_sample import Loss, PerSample
from instep.privacy.grid import Grid
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward, to_device
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute, Results


class Private(Compute):
    """Runs one worker's passes, each the sum of its samples' clipped gradients.

    Args:
        engine, forward: the worker's.
        grid: of the sums.
        loss: of one sample.
        seed: of the run.
        activity: told what is being done.
        left: whether the members have changed meanwhile.
        warn: is told, once, where the loss compares samples.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        grid: Grid,
        loss: Loss,
        seed: int,
        activity: Activity,
        left: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._engine, self._forward, self._seed, self._warn = engine, forward, seed, warn
        self._activity, self._left = activity, left
        self._key = 0
        given = forward.model, engine.parameters, loss, grid
        self.per_sample = PerSample(*given, seed=lambda number: set_generators(self._key + number))

    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Run the passes, as `Compute.run` says."""
        losses = dict[int, Weighed]()
        for number, part in enumerate(share.passes):
            if self._left():
                raise PeerError("the members changed in the middle of a step.")
            since = time.perf_counter()
            self._activity.enter("loading")
            read = next(reads)
            self._engine.clock.lap(since, "load")
            self._one(part, read, step, number == len(share.passes) - 1)
            losses[part.number] = Weighed(0.0, float(part.size))
        return Results(losses, [])

    def _one(self, part: Pass, read: Read, step: int, last: bool) -> None:
        engine, since = self._engine, time.perf_counter()
        self._activity.enter("backward")
        self._key = key_of_pass(self._seed, step, part.number, 0)
        set_generators(self._key)
        sums = self._sums(read)
        engine.passes.begin(part, 1.0, last=last)
        for slot, each in enumerate(sums):
            engine.passes.gradient(slot, each)
        engine.passes.end(part, part.size / max(1, engine.where.size))
        engine.clock.lap(since, "backward")

    def _sums(self, read: Read) -> list[Tensor]:
        if not read.size:  # its places have no sample: zeros, or a step might have no noise
            return [torch.zeros_like(p, dtype=torch.int32) for p in self._engine.parameters]
        batch = to_device(read.batch, self._engine.device)
        sums = self.per_sample.sums(batch, read.size)
        if said := self.per_sample.compared():
            self._warn(said)
        return sums
