"""Everything that follows a commit: the rules of `[stop]`, validation, callbacks, checkpoints.

It is done again where a member is lost in the middle of it, so each part bears that. All workers
come to the same decisions, from the step's number or from what they agreed on in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from instep.comm.base import Comm
from instep.comm.protocol.messages import NOT_FINITE, ON_REQUEST, SPREAD
from instep.data.batches import Batches
from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.state.committed import Commit
from instep.engine.step.agreement import Agreement
from instep.recipe.optimizers.plateau import Plateau
from instep.state.retention import Best
from instep.worker.loop.callbacks import Callbacks
from instep.worker.loop.parts import Parts, Shards
from instep.worker.loop.saving import Saver
from instep.worker.loop.stopping import Stopping
from instep.worker.passes.activity import Activity
from instep.worker.rounds.after_round import spread_of

CALLBACKS = "callbacks"
"""The phase in which the recipe's callbacks are called."""


@dataclass(frozen=True)
class Step:
    """A committed step."""

    number: int
    """Counts from 1."""
    epoch: int
    """Counts from 0."""
    loss: float
    """Mean over the global batch."""
    metrics: dict[str, float] | None
    """Of the validation that followed this step, if one did."""
    ends_epoch: bool = False
    """Whether the epoch has no further step."""
    losses: dict[str, float] = field(default_factory=dict)
    """Of each turn by its name, where a step has several; `loss` is that of the last."""


class AfterCommit:
    """One worker's part in what follows each commit.

    Args:
        member, engine, batches, callbacks, activity: the worker's.
        model: that is saved.
        last_step: of the job; None if the user's loop decides.
        validate: gives the metrics as of the end of a step; None where there is no dataset.
        best: gives the rule by which checkpoints are kept for their metrics, if there is one.
    """

    def __init__(
        self,
        member: Member,
        engine: Engine,
        batches: Batches,
        callbacks: Callbacks,
        activity: Activity,
        *,
        model: nn.Module,
        last_step: int | None,
        validate: Callable[[Position], dict[str, float] | None],
        best: Callable[[], Best | None],
    ) -> None:
        self._member, self._engine, self._batches = member, engine, batches
        self._callbacks, self._activity, self._model = callbacks, activity, model
        self._last_step = last_step
        self._validate, self._best = validate, best
        self.parts = Parts(engine, member)
        """Writes what the worker that saves does not have."""
        self._epoch_ends: Callable[[int], None] = lambda step: None
        self.rule = "steps" if member.job.train.steps else "epochs"
        """Why the run ends, once it does."""
        self.saver: Saver | None = None
        """On the worker that saves: rank 0."""
        self._stopping: Stopping | None = None
        self._told_saved = -1  # step of the newest checkpoint that has been called back for

    # ---- generations

    @property
    def stopping(self) -> Stopping:
        """The rules of `[stop]`; available once a group has formed."""
        assert self._stopping is not None, "join() comes first"
        return self._stopping

    def regroup(self, comm: Comm) -> None:
        """A generation begins with these members: the first of them saves."""
        if self._stopping is None:
            self._stopping = Stopping(self._member, comm, self._engine.device)
        self._stopping.regroup(comm)
        if comm.rank != 0:
            self.hand_over()
        elif self.saver is None:
            self.saver = Saver(self._member, self._model, self._best())
            self._told_saved = -1

    def go_back(self, step: int) -> None:
        """This worker is back at an earlier step."""
        if self._stopping is not None:
            self._stopping.go_back(step)

    def hand_over(self) -> None:
        """Finish what is being saved: another worker saves from here on."""
        if self.saver is not None:
            self.saver.hand_over()
            self.saver = None

    def drop_after(self, step: int) -> bool:
        """Discard the checkpoints of later steps, if this worker saves; whether it does."""
        if self.saver is None:
            return False
        self.saver.drop_after(step)
        return True

    # ---- a commit

    @property
    def is_late(self) -> bool:
        """Whether this worker saves, and it is time for a checkpoint."""
        return self.saver is not None and self.saver.late()

    def settle(self, done: Commit) -> Step:
        """Do all that follows a commit; done again if a member is lost meanwhile.

        Raises:
            PeerError: a member was lost.
        """
        engine, stopping = self._engine, self.stopping
        self._member.lease.check()
        where = self._batches.of(done.step)
        self._report_epoch(where, done.step)
        stopping.after_commit(done.step, done.loss, done.norm, last=done.ends)
        timely = self.is_time(done.step)
        metrics = self._validate(where) if done.ends or timely else None
        if metrics is not None and timely:
            self._tell_plateaus(done.step, metrics["loss"])
        if metrics is not None and not done.ends:
            stop = stopping.after_validation(done.step, metrics)
            engine.state.last = done = done._replace(told=stop, ends=stop)
        names = [turn.name for turn in engine.turns] if done.losses else []
        losses = dict(zip(names, done.losses, strict=True))
        self._activity.enter(CALLBACKS)
        self._callbacks.after_step(done, where, metrics, losses)
        self._save(done, where, metrics)
        if done.ends:
            self._find_rule(done)
        engine.state.settled = done.step
        ends_epoch = self._batches.ends_epoch(done.step)
        return Step(done.step, where.epoch, done.loss, metrics, ends_epoch, losses)

    def tell_epochs(self, ends: Callable[[int], None]) -> None:
        """From now on, call this with the last step of each epoch."""
        self._epoch_ends = ends

    def is_time(self, step: int) -> bool:
        """Whether a validation is due after a step."""
        every = self._member.job.train.validate_every
        return step % every == 0 if every else self._batches.ends_epoch(step)

    def _report_epoch(self, where: Position, step: int) -> None:
        if not self._batches.ends_epoch(step):
            return
        progress = self._engine.state.progress
        if self._engine.comm.rank == 0:
            self._member.emit(
                "epoch_finished",
                epoch=where.epoch,
                step=step,
                loss=progress.epoch_loss / progress.epoch_samples,
                samples=progress.epoch_samples,
            )
        self._epoch_ends(step)

    def _tell_plateaus(self, step: int, loss: float) -> None:
        for turn in self._engine.turns:
            if isinstance(turn.update.scheduler, Plateau):
                turn.update.scheduler.measured(step, loss)

    # ---- why the run ends

    def ends(self, step: int, agreed: Agreement, norm: float | None) -> bool:
        """Whether this session ends with a step, although no stop was asked for."""
        diverged = bool(self.stopping.not_finite(agreed.loss, norm))
        return (
            diverged
            or bool(self.stopping.too_far_apart(spread_of(self._engine.turn.strategy)))
            or step in (self._last_step, self._member.job.train.stop_after_steps)
        )

    @property
    def finite(self) -> bool:
        """Whether the run ends with a loss that is finite."""
        last = self._engine.state.last
        return self.rule != NOT_FINITE and (last is None or math.isfinite(last.loss))

    def end_by(self, rule: str) -> None:
        """Say by what the run ends, unless something else is found."""
        self.rule = rule

    def _find_rule(self, done: Commit) -> None:
        self.end(done.step, asked=done.told, why=self.stopping.not_finite(done.loss, done.norm))
        apart = self.stopping.too_far_apart(spread_of(self._engine.turn.strategy))
        if not done.told and apart:
            self.rule = SPREAD
            self.stopping.report(apart, done.step, SPREAD)

    def end(self, step: int, *, asked: bool, why: str = "") -> None:
        """The run ends with a step, which need not be its last.

        Args:
            asked: whether somebody wants it.
            why: the loss or the gradient is not finite; empty where they are.
        """
        if step == self._last_step:
            return
        if why:
            self.rule = NOT_FINITE
            self.stopping.report(why, step)
            return
        self.rule = ON_REQUEST if asked else "stop_after_steps"

    # ---- checkpoints

    def _save(self, done: Commit, where: Position, metrics: dict[str, float] | None) -> None:
        self._activity.enter("saving")
        saver, job = self.saver, self._member.job
        due = done.ends or done.saves or job.checkpoint.due(done.step)
        due = due or (saver is not None and saver.is_best(done.step, metrics))
        own, since = dict[str, Tensor](), time.perf_counter()
        shards: Shards = {}
        if self.parts.many and (due or metrics is not None):
            saved = due and not self.stopping.diverged
            due, own, shards = self.parts.write(saved, last=done.ends)
        if saver is not None and not self.stopping.diverged:
            saver.after_step(
                self._engine,
                where,
                due=due,
                last=done.ends,
                metrics=metrics,
                own=own,
                shards=shards,
                since=since,
            )
            self._tell_saved(saver)

    def save_last(self, step: int) -> None:
        """Save as of the last step, in a loop that nobody knew to end with it."""
        if self.saver is not None and not self.stopping.diverged:
            where = self._batches.of(step) if step else Position(0, 0, 0)
            self.saver.after_step(self._engine, where, due=True, last=True)

    def save_model(self, step: int) -> bool:
        """Write the model as the run leaves it; whether this worker does."""
        if self.saver is None:
            return False
        with self._engine.state.averaged():
            self.saver.finish(step, self._engine.comm, self._engine.tables)
        self._tell_saved(self.saver)
        return True

    def _tell_saved(self, saver: Saver) -> None:
        """Call back for checkpoints that have become complete."""
        if saver.newest != self._told_saved:
            self._told_saved = saver.newest
            with self._activity.during(CALLBACKS):
                self._callbacks.after_save()
