"""The backward passes of a user's own loop: a gradient is taken as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from instep.engine.engine import Engine
from instep.engine.step.agreement import Weighed
from instep.errors import PeerError, SpecError
from instep.recipe.weights import WeightedLoss, as_weight
from instep.worker.own.checks import Guard
from instep.worker.own.iteration import Iteration, OwnStep
from instep.worker.own.strangers import Strangers


class Backward:
    """Takes the gradients of the present iteration to the engine.

    Args:
        engine: the worker's.
        step: that the user's code is in.
        guard, strangers: look at what the user's code does.
        last: called at the end of the step's last backward pass.
    """

    def __init__(
        self,
        engine: Engine,
        step: OwnStep,
        guard: Guard,
        strangers: Strangers,
        last: Callable[[], None],
    ) -> None:
        self._engine, self._step, self._last = engine, step, last
        self._guard, self._strangers = guard, strangers
        self._queued = False  # a callback at the end of the present backward pass
        self.tells = False
        """Whether the user's code says what the loss is."""

    def begin_step(self) -> None:
        """Get ready for the passes of another step."""
        self._queued = False

    def weigh(self, loss: Tensor | WeightedLoss) -> Tensor:
        """Note the weight of a loss, and return the tensor to call `backward` on.

        Args:
            loss: the mean over the batch; or a total and what it is a total of.

        Raises:
            SpecError: it is not one number, or its weight is another than before in this batch.
        """
        now, step = self._step.iteration("backward()"), self._engine.step
        if isinstance(loss, WeightedLoss):
            weight = as_weight(loss.weight, "the weight of backward()")
            if now.begun and not now.part.repeats and weight != now.weight:
                raise SpecError(
                    f"step {step}: session.backward() was given a loss of weight {weight:g} "
                    f"after one of weight {now.weight:g} for the same batch, whose gradients are "
                    "in. Give each loss of a batch the same weight, or add them up in one."
                )
            if not now.part.repeats:
                now.weight = weight
            loss = loss.total / (weight or 1.0)
        if loss.numel() != 1:
            raise SpecError(
                f"session.backward() was given a tensor of shape {list(loss.shape)}: a loss is one "
                "number. Take its mean; or give an instep.WeightedLoss, its sum and what it is a "
                "sum of."
            )
        self.tells = True
        self._strangers.look(loss, self._engine.where.epoch)
        if not now.part.repeats:
            now.total = now.held + float(loss.detach()) * (now.weight or 1.0)
            now.held = now.total if self._step.held_back else now.held
        return loss

    def skip(self) -> None:
        """Run the backward pass of a batch that is to count nothing, whatever is in it."""
        nothing = torch.stack([p.flatten()[:1].sum() for p in self._guard.trained]).sum() * 0
        self.weigh(WeightedLoss(nothing, 0.0)).backward()

    def record(self, loss: float, weight: float | None = None) -> None:
        """Count the mean loss of the present batch, and how much it is a mean of.

        Raises:
            SpecError: its backward pass is over, or there is no batch.
        """
        now = self._step.iteration("record()")
        if now.begun:
            raise SpecError(
                "record() was called after backward(), at whose end the workers agree: call it "
                "before, or use session.backward(loss), which does both."
            )
        self.tells = True
        if not now.part.repeats:
            now.weight = (
                now.weight if weight is None else as_weight(weight, "the weight of record()")
            )
            now.total = loss * (now.weight or 1.0)

    def take(self, slot: int, gradient: Tensor) -> None:
        """Take a gradient that is complete, in the middle of a backward pass.

        Raises:
            SpecError: it is of no batch, or of one whose backward pass is over.
        """
        now = self._step.iteration("backward()")
        if self._step.apart is not None:
            return
        if now.computed:
            raise SpecError(
                "backward() was called twice for one batch of the loader. Add the losses up, or "
                "call all but the last inside session.no_sync()."
            )
        try:
            self._receive(now, slot, gradient)
        except PeerError as error:
            self._step.breaks(error)
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _receive(self, now: Iteration, slot: int, gradient: Tensor) -> None:
        """Hand a gradient to the workers, who are to agree on it."""
        if not now.begun:
            now.begun = True
            where = self._engine.where
            factor = 0.0 if now.part.repeats else (now.weight or 1.0) / where.size
            last = now.last and not self._step.held_back
            self._engine.passes.begin(now.part, factor, last=last)
        self._engine.passes.gradient(slot, gradient)

    def _over(self) -> None:
        now, self._queued = self._step.now, False
        if now is None or self._step.held_back or self._step.apart is not None:
            return
        self.end(now)
        if now.last:
            self._last()

    def end(self, now: Iteration) -> None:
        """End the pass of an iteration."""
        now.computed = True
        where = self._engine.where
        if not now.part.repeats:
            self._step.losses[now.part.number] = Weighed(now.total, now.weight)
        share = 0.0 if now.part.repeats else now.samples / where.size
        self._engine.passes.end(now.part, share)
