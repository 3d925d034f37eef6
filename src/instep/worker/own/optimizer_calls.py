"""Calls of optimizer, scheduler and scaler in a user's own loop, and what each comes to.

In a step's last iteration they do what they say, once the workers have agreed on the gradient; in
all others they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from instep.data.order import key
from instep.engine.engine import Engine
from instep.engine.state.committed import CommittedState
from instep.engine.update import OF_UPDATE, Update
from instep.errors import PeerError, SpecError
from instep.recipe.build import set_generators
from instep.worker.own.backward import Backward
from instep.worker.own.checks import Guard
from instep.worker.own.iteration import Iteration, OwnStep
from instep.worker.own.shared_calls import SharedCalls
from instep.worker.own.taken_over import take_over


class OptimizerCalls:
    """Answers the calls of the user's code.

    Args:
        optimizer, scheduler, scaler: of the user; the last two may be None.
        engine, update: the worker's.
        step: that the user's code is in.
        backward, guard, shared: other parts of the loop.
        seed: of the run.
        per_epoch: steps in an epoch.
        advances: whether the scheduler is advanced after every step, and not by the user.
        agree: has the workers agree on the step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        scaler: Any,
        *,
        engine: Engine,
        update: Update,
        step: OwnStep,
        backward: Backward,
        guard: Guard,
        shared: SharedCalls,
        seed: int,
        per_epoch: int,
        advances: bool,
        agree: Callable[[], None],
    ) -> None:
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self._engine, self._update, self._step = engine, update, step
        self._backward, self._guard, self._shared = backward, guard, shared
        self._seed, self._per_epoch, self._advances = seed, per_epoch, advances
        self._agree = agree
        self._norm: float | None = None
        self._unscaled = False
        self._awaits_commit = False  # the scaler has noted that this step's gradients are unscaled
        self.give_back = take_over(self)
        """Let them do again what they did before."""
        self._taken = optimizer.__dict__["step"]

    @property
    def state(self) -> CommittedState:
        """State as of the last commit."""
        return self._engine.state

    def exchange(self) -> None:
        """Agree on the step, whose last backward pass is over, and hand the gradients out."""
        self._guard.check_written(self._engine.step)
        self._forget_unscaled()
        try:
            self._agree()
            if self._step.agreed is not None:
                self._engine.hand_out()
                self._guard.check_zeros(self._engine.step)
                self._norm, self._unscaled = self._update.clip(), self._update.clips
        except PeerError as error:
            self._step.breaks(error)

    def _forget_unscaled(self) -> None:
        """Make the scaler forget gradients that it unscaled before, if they came to nothing."""
        self._unscaled = False
        if self._awaits_commit:
            self._awaits_commit = False
            type(self.scaler).update(self.scaler, self.scaler.get_scale())

    # ---- the optimizer

    def optimizer_step(self, move: Callable[[], Any]) -> None:
        """Take `optimizer.step()`, or `scaler.step(optimizer)`.

        Args:
            move: does what it did before it was taken over.
        """
        if self._step.direct:
            move()
            return
        now = self._take_in_step()
        if now is None or not self._step.moves:
            return
        self._guard.check_trained()
        try:
            self._step.commit(self._engine.commit(lambda step: self._move(move, step)))
            self._awaits_commit = False
            self._shared.follow(self.state.progress.step)
        except PeerError as error:
            self._step.breaks(error)

    def _take_in_step(self) -> Iteration | None:
        """Take `optimizer.step()`: the iteration, unless the group came apart in it.

        Raises:
            SpecError: it cannot be called here.
        """
        now = self._step.iteration("optimizer.step()")
        if self.optimizer.__dict__.get("step") is not self._taken:
            raise SpecError(
                "a scheduler was made for the optimizer after prepare(), which does not know of "
                "it: it would be advanced in every iteration, and be in no checkpoint. Make it "
                "before, and give it to prepare() too."
            )
        if self._step.apart is not None:
            return None
        if now.stepped:
            raise SpecError(
                "optimizer.step() was called twice for one batch of the loader: a step takes "
                "train.global_batch samples and moves once. Call it once in every iteration."
            )
        if now.begun and not now.computed:  # its backward passes were all inside no_sync()
            self._backward.end(now)
            if now.last:
                self.exchange()
        now.stepped = now.computed
        return now

    def _move(self, move: Callable[[], Any], step: int) -> float | None:
        set_generators(key(self._seed, OF_UPDATE, step))  # some optimizers draw
        with self._step.directly():
            move()
            if self._advances:
                self.scheduler.step()
        return self._norm

    def zeroed(self, *, to_none: bool) -> None:
        """Take `optimizer.zero_grad(set_to_none)`."""
        self._guard.leaves_zeros = not to_none

    # ---- scaler and scheduler

    def unscale(self, original: Callable[..., Any]) -> None:
        """Take `scaler.unscale_(optimizer)`: once, where there is a gradient."""
        if self._step.now is None or (self._step.moves and not self._unscaled):
            original(self.optimizer)
            self._unscaled = True
            self._awaits_commit = self._step.now is not None

    def after_move(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take `scheduler.step()` or `scaler.update()`: once for each step that counts.

        Between two steps, such as after each epoch, every call counts; but one that is in the
        state already, which a checkpoint or another worker gave, is not made again, and none
        is where a stop has cut the epoch short.
        """
        step, now = self._step, self._step.now
        if now is None:
            if self.state.over and self.state.progress.step % self._per_epoch:
                return None  # the epoch is to be continued
            return original(*args, **kwargs) if self._update.between.is_new() else None
        if now.last and not now.stepped and not step.comes_again and step.apart is None:
            raise SpecError(
                f"step {self._engine.step}: the scheduler's step() or the scaler's update() was "
                "called before optimizer.step(). Call it after, in every iteration."
            )
        return original(*args, **kwargs) if step.committed is not None else None

    def scheduler_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take `scheduler.step()`."""
        if self._step.direct:
            return original(*args, **kwargs)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self._agree_on_plateau(*args, **kwargs)
        if self._advances:
            raise SpecError(
                "scheduler.step() was called, but prepare(scheduler=...) has the session advance "
                "the scheduler after every step. Leave the call out; or give the scheduler among "
                "the other arguments, without the name."
            )
        return self.after_move(original, *args, **kwargs)

    def _agree_on_plateau(self, metrics: Any, epoch: Any = None) -> None:
        """Find a plateau of a metric in every process alike, or the rates would differ.

        Raises:
            SpecError: the processes have other metrics, or it is called within a step.
        """
        name = "the step() of ReduceLROnPlateau"
        if self._step.now is not None:
            raise SpecError(
                f"{name} was called in an iteration: a metric is known "
                "after an evaluation. Call it after the loop over the loader."
            )
        found = [row[0] for row in self._shared.rows(name, [float(metrics)])]
        if len({*map(repr, found)}) > 1:
            raise SpecError(
                f"{name} was given {found[0]:g} in one process and "
                f"{next(n for n in found if repr(n) != repr(found[0])):g} in another: their "
                "learning rates would differ. Give the metric of the whole evaluation: "
                "session.gather_for_metrics and session.sum help to get it."
            )
