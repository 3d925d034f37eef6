"""Ordinary passes: forward and backward pass of each micro-batch, or of several as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from instep.data.loader import Read, Skipped
from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.passes import Pass, Share
from instep.engine.step.agreement import Weighed
from instep.engine.turns import key_of_pass
from instep.errors import PeerError
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.recipe.rehearsal import called_backward
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute, Results


class Ordinary(Compute):
    """Runs one worker's passes, each weighted by what its loss is a mean of.

    Args:
        engine, forward: the worker's.
        seed: of the run.
        activity: told what is being done.
        left: whether the members have changed meanwhile.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        seed: int,
        activity: Activity,
        left: Callable[[], bool],
    ) -> None:
        self._engine, self._forward, self._seed = engine, forward, seed
        self._activity, self._left = activity, left

    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Run the passes, as `Compute.run` says."""
        clock = self._engine.clock
        losses, skipped = dict[int, Weighed](), list[Skipped]()
        self._forward.take_turn(self._engine.turn.number)
        last = len(share.passes) - 1
        for number, part in enumerate(share.passes):
            if self._left():
                raise PeerError("the members changed in the middle of a step.")
            since = time.perf_counter()
            self._activity.enter("loading")
            read = next(reads)
            clock.lap(since, "load")
            skipped += [] if part.repeats else read.skipped
            if read.size:
                found = self._one(part, read, where.size, step, number == last)
                losses |= found
        return Results(losses, skipped)

    def _one(
        self, part: Pass, read: Read, batch_size: int, step: int, last: bool
    ) -> dict[int, Weighed]:
        """Run a pass; its loss by its number, where it counts."""
        engine, forward, since = self._engine, self._forward, time.perf_counter()
        batch = read.batch if engine.ends_step else on_tensors(read.batch, Tensor.clone)
        set_generators(key_of_pass(self._seed, step, part.number, engine.turn.number))
        taken = engine.passes.taken
        self._activity.enter("forward")
        kept = forward.kept(batch, read.size)
        share = 0.0 if part.repeats else kept / batch_size
        left_out = 0 if part.repeats else read.size - kept
        moves = len(engine.buffers) > 0 and kept > 0 and forward.recipe.weight is None
        found = forward.loss(batch, read.size, always=moves)
        if engine.passes.taken != taken:  # the trial did not see this sample
            raise called_backward()
        if found is None or not found.counts:  # no sample of it has a loss
            engine.passes.skip(part, share, left_out=left_out)
            return {}
        total = float(found.loss.detach()) * found.factor
        since = engine.clock.lap(since, "forward")
        self._activity.enter("backward")
        # one that repeats another's counts nothing, and has its gradients, which are compared
        loss, left = weighted(found.loss, found.factor / batch_size)
        engine.passes.begin(part, 0.0 if part.repeats else left, last=last)
        engine.turn.update.scaler.scale(loss).backward(inputs=engine.trained)
        engine.passes.end(part, share, left_out=left_out)
        engine.clock.lap(since, "backward")
        return {} if part.repeats else {part.number: Weighed(total, found.weight)}


def weighted(loss: Tensor, weight: float) -> tuple[Tensor, float]:
    """Scale a loss to its share of the step's, before its backward pass.

    What goes back through layers in 16 bits is then rounded as in a pass over the whole batch,
    however that is cut. A loss in 16 bits would round the share itself.

    Returns:
        The loss; and the factor that its gradients are still to be multiplied by.
    """
    return (loss * weight, 1.0) if loss.dtype.itemsize >= 4 else (loss, weight)
