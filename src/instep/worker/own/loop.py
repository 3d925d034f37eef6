"""The user's own training loop, by the conventions of Accelerate.

The loop stays an ordinary one. An iteration is one pass: a micro-batch, unless
`train.merge` joins them. Gradients are taken as a backward pass completes them. When
the backward pass of a step's last iteration is over, the workers agree and
every `.grad` holds the agreed gradient, so clipping and edits see it; then
`optimizer.step()` moves the parameters and commits. In all other iterations
`optimizer.step()` and `scheduler.step()` do nothing.

Where a worker is lost, nothing is raised into the user's code: what is left of the
iteration does nothing, and the loader gives the step's batches once more. What talks
between two steps (`sum`, `gather`, `validated`) is repeated with the workers that are there then; a
worker that takes another's place is answered from a log (`calls.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from instep.comm.base import Comm
from instep.comm.protocol.messages import ON_REQUEST, Heartbeat
from instep.data.loader import Loader, Read, Skipped
from instep.data.order import Position, key, steps_in_epoch
from instep.data.reading.threads import cpu_clock
from instep.data.torch_loader import Unused
from instep.engine.engine import Agreement, Weighed
from instep.engine.member import Member
from instep.engine.passes import OF_PASS, Pass, Share, parts_of, share_of
from instep.engine.sections import after, of_epoch
from instep.engine.state.committed import Commit
from instep.engine.update import OF_UPDATE, Update
from instep.errors import PeerError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.build import check_optimizer, check_scheduler, set_generators
from instep.recipe.weights import WeightedLoss, as_weight
from instep.state.retention import best_rule
from instep.worker.loop.after_commit import Step
from instep.worker.loop.loop import Loop
from instep.worker.own import evaluation
from instep.worker.own.as_loader import AsLoader
from instep.worker.own.calls import EVALUATION, Call, Calls, Waits
from instep.worker.own.checks import Guard, refuse, verdict_of
from instep.worker.own.evaluation import NONE, Piece, Round
from instep.worker.own.iteration import Batch, Iteration
from instep.worker.own.strangers import Strangers
from instep.worker.own.taken_over import take_over
from instep.worker.passes.base import Dealt, Results

_PLATEAU = "the step() of ReduceLROnPlateau"

_LOOK_S = 0.05
"""How often processes that cannot continue without a new worker look for one."""


class _PartsMissing(Exception):
    """Of an evaluation: the worker that had them is lost, and has not been replaced yet."""


class OwnLoop(Loop):
    """What stands behind the loader, the optimizer and the scheduler of a user's own loop.

    Args:
        member: this worker's membership in the run.
        model: on its device.
        optimizer: of its parameters; `step` is taken over.
        scheduler: of the optimizer, or None; `step` is taken over.
        loader: of the dataset.
        samples: in it.
        scaler: of the loss, or None; `step`, `update` and `unscale_` are taken over.
        lost: what of the user's `DataLoader`s is not kept.
        advances: whether the scheduler is advanced after every step, and not by the user.

    Raises:
        SpecError: the job asks for what an own loop cannot give.
        RecipeError: the optimizer or the scheduler cannot be used.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        loader: Loader,
        samples: int,
        scaler: torch.amp.GradScaler | None = None,
        lost: Sequence[Unused] = (),
        *,
        advances: bool = False,
    ) -> None:
        job = member.job
        refuse(job)
        best_rule(job.checkpoint, ())  # your validation is not seen from here
        check_optimizer(optimizer, model)
        if advances or not isinstance(scheduler, ReduceLROnPlateau):
            check_scheduler(scheduler)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._advances = advances
        update = self._make_update(job)(
            optimizer,
            scheduler,
            parameters,
            seed=job.seed,
            max_grad_norm=job.train.max_grad_norm,
            measure=job.measures_norm,
            scaler=scaler or torch.amp.GradScaler("cuda", enabled=False),
        )
        super().__init__(member, model, parameters, update, loader, samples, None, take=self._take)
        if self.engine.strategy.laws:
            delayed, codec = "sync.options.delayed = true", f"sync.codec = {job.sync.codec!r}"
            asked = delayed if job.sync.delayed else codec
            raise SpecError(
                f"{asked} needs a recipe: in your own loop a step that "
                "another worker may have committed cannot be finished for you. Leave it out."
            )
        self._cpu = cpu_clock()
        member.at = lambda: Heartbeat(
            step=self.step,
            steps=self._done,
            phase=self.phase,
            progress=self._progress(),
            cpu_s=self._cpu(),
        )
        self.compute = Dealt()
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self._now: Iteration | None = None
        self._losses: dict[int, Weighed] = {}
        self._skipped: list[Skipped] = []
        self._share = Share([], 0, 0)
        self._agreed: Agreement | None = None
        self._norm: float | None = None
        self._committed: Commit | None = None
        self._apart: PeerError | None = None  # the group came apart within an iteration
        self._exchanged = self._held_back = False
        self._items: Generator[Any] | None = None
        self._left_epoch = 0  # the step that ended the epoch the loader left last
        self._queued = False  # a callback at the end of the present backward pass
        self._direct = False  # the optimizer is to move now, whichever code calls it
        self._unscaled = False
        self._rests = False  # the loader's next epoch is what is left of the present one
        self._tells = False  # the loss, by `weigh` or `record`
        self.round: Round | None = None
        """Of the evaluation that the user's code is in."""
        self._evaluates_since: float | None = None
        self._lost = lost
        self._guard = Guard(model, optimizer, alone=job.per_commit.micro_batches == 1)
        self._strangers = Strangers(model, self._users_iteration)
        self._calls = Calls()
        self._known_step: int | None = None  # the commit that the calls follow
        self._waits_in = Waits()
        self._epoch_at: int | None = None  # that `epochs` gave last
        self.after.end_by("own loop")
        self.engine.applies_staged = False  # the user's code edits the gradient before
        self._give_back = take_over(self)
        self._taken = optimizer.__dict__["step"]

    def _make_update(self, job: JobSpec) -> Callable[..., Update]:
        """What moves the parameters."""
        return Update

    # ---- what a loop must say

    @property
    def _merge(self) -> bool:
        return self.job.train.merge == "always" and self.job.train.determinism != "bits"

    def _lengths(self) -> dict[str, int]:
        return {"train": self.samples}

    def _before_steps(self, comm: Comm) -> None:
        """There is nothing to try: the user runs the passes. What its code did between, is told."""
        step = self.state.progress.step
        if self._known_step is not None and step != self._known_step:
            self._calls.commit(step, (step - 1) // self._per_epoch)
            self._enter(after(step))
        self._known_step = step
        if self.member.recovers:
            self._waits_in.compare(comm, self.device)
            self._calls.agree(comm, step, self.device)

    def _follow(self, step: int) -> None:
        """What the user's code does from here on follows this commit."""
        epoch = (step - 1) // self._per_epoch
        self._calls.commit(step, epoch)
        self._update.between.commit(step, epoch)
        self._known_step = step
        self._waits_in.commit()

    @property
    def _per_epoch(self) -> int:
        return steps_in_epoch(self.samples, self.job.per_commit.global_batch)

    def _progress(self) -> int:
        """What changes while this worker gets something done.

        What the user's code does between two steps is its own affair, for as long as it takes.
        """
        between = self._now is None and self.phase == "your loop"
        return self.engine.taken + (int(time.monotonic()) if between else 0)

    def join(self) -> None:
        """Form the group with the other workers, and get ready for the first batch.

        Raises:
            InstepError: the workers cannot train together.
        """
        began = time.time()
        self.member.recovers &= self.device.type == "cpu"  # NCCL waits long for who is gone
        self.member.interrupt, self.member.hold = self._interrupt, self.engine.hold
        self._loader.begin()
        self._regroup()
        self.member.phases["group"] = time.time() - began
        for lost in self._lost:
            self._warn(lost.text)
        if self.engine.comm.rank == 0 and not self.member.others_have_state:
            self.member.emit("same_as_one_machine", verdict=self._verdict())
        self._announce(validation_samples=0)
        self._items = self.run()
        self._left_epoch = self.step
        self.phase = "your loop"

    def _verdict(self) -> str:
        """Whether the run gives the result of one machine."""
        return verdict_of(self._model, self.job.train, self._lost)

    # ---- the loader

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """The epochs from the one that the run is in, up to `count` in all.

        A run that was stopped, or a worker that takes another's place, is in the epoch of its
        last step, even if nothing of it is left.
        """
        fresh, ends = self._epoch_at is None, self.step > 0 and self.step % self._per_epoch == 0
        self._rests = fresh and ends
        first = max(0, self.step - 1) // self._per_epoch + (ends and not fresh)
        for epoch in range(first, self.job.train.passes if count is None else count):
            if self.stopped and not (fresh and self.step):
                return
            fresh = False
            if epoch != self._epoch_at:
                self._epoch_at = epoch
                self._enter(of_epoch(epoch))
            yield epoch

    def _enter(self, section: str) -> None:
        self._calls.enter(section)
        self._update.between.enter(section)

    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch, or of what is left of this one.

        Raises:
            SpecError: the loop was left in the middle of a step, and comes back.
        """
        if self._rests:
            self._rests = False
            self._enter(after(self.step))
            return
        if self._epoch_at is None and self.member.recovers:
            raise SpecError(
                "the loop over the loader is not within `for epoch in session.epochs():`, as it "
                "has to be under instep run: a worker that takes another's place begins there."
            )
        if self._begun and not self.stopped:
            raise self._left("its other batches are still to come")
        assert self._items is not None, "join() comes first"
        for item in self._items:
            if isinstance(item, Batch):
                self.phase = "your loop"
                yield item.value
            elif item.ends_epoch and item.number > self._left_epoch:
                self._left_epoch = item.number
                self.phase = "your loop"
                return
        self.phase = "your loop"
        if self.step:
            self._enter(after(self.step))

    def length(self) -> int:
        """Batches that this worker has in a whole epoch."""
        steps = self._per_epoch
        planned = self.engine.assignment.plan(1, steps, merge=self._merge)
        sizes = [max(1, len(share.passes)) for _, share in planned]
        return sum(sizes)

    def largest(self) -> int:
        """Samples of the largest batch that this worker has in a full step."""
        planned = self.engine.assignment.plan(1, 1, merge=self._merge)
        return max((part.size for _, share in planned for part in share.passes), default=0)

    def _passes(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Batch, None, Results]:
        self._begin(share)
        reads = self._readable(where, share, loads)
        following = next(reads, None)
        while following is not None:
            (part, read), following = following, next(reads, None)  # which is the last is known
            if self.member.superseded:
                raise PeerError("the members have changed in the middle of a step.")
            now = self._now = Iteration(part, read.size, last=following is None)
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number))
            since = time.perf_counter()
            yield Batch(read.batch)
            self._now = None
            self._raise_apart()
            if now.begun and not now.computed and not now.last:  # all of it inside no_sync()
                self._end_pass(now)
            self._refuse_half_done(now)
            self.engine.clock.lap(since, "forward")
        return Results(self._losses, self._skipped)

    def _begin(self, share: Share) -> None:
        """The iterations of a step are about to come."""
        self._share = share
        self._losses, self._skipped, self._agreed = {}, [], None
        self._apart, self._exchanged, self._committed = None, False, None
        self._unscaled = self._queued = False
        self._guard.begin_step()

    def _readable(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Iterator[tuple[Pass, Read]]:
        """This worker's passes that have samples; one that counts nothing where there is none.

        So every worker's loop runs at least once in a step, and does what the user wrote
        between backward pass and optimizer on every worker alike.
        """
        found = False
        for part in share.passes:
            read = next(loads)
            self._skipped += read.skipped
            if read.size:
                found = True
                yield part, read
        if found:
            return
        every = share_of(where, parts_of(where, self.job.train), 1, 0, merge=False).passes
        reads = self._loader.read((part.samples for part in every), None)
        for part, read in zip(every, reads, strict=True):
            if read.size:
                yield part._replace(repeats=True), read
                return
        raise PeerError("no sample of the step can be read.")

    def _raise_apart(self) -> None:
        if self._apart is not None:
            raise self._apart

    def _refuse_half_done(self, now: Iteration) -> None:
        """Every iteration is one backward pass and one `optimizer.step()`."""
        if not now.begun:
            raise SpecError(
                f"step {self.step}: a batch of the loader had no backward pass, so its samples "
                "would count without having been trained on. Call session.backward(loss) for "
                "every batch; where one is not to count (its loss is NaN), session.skip() instead "
                "of it, and optimizer.step() as ever."
            )
        if now.last and not now.stepped:
            raise SpecError(
                f"step {self.step}: optimizer.step() was not called for its last batch. Call it in "
                "every iteration; where session.sync_gradients is False it does nothing. How many "
                "batches make a step is set by train.micro_batches."
            )

    def _settle(self, done: Commit) -> Step:
        if done.step % self._per_epoch == 0:
            self._guard.compare(self.engine.comm)
        return super()._settle(done)

    # ---- the backward pass

    def weigh(self, loss: Tensor | WeightedLoss) -> Tensor:
        """The loss to call `backward` on, with its weight noted.

        Args:
            loss: the mean over the batch; or a total and what it is a total of.
        """
        now = self._in_iteration("backward()")
        if isinstance(loss, WeightedLoss):
            weight = as_weight(loss.weight, "the weight of backward()")
            if now.begun and not now.part.repeats and weight != now.weight:
                raise SpecError(
                    f"step {self.step}: session.backward() was given a loss of weight {weight:g} "
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
        self._tells = True
        self._strangers.look(loss, (self.step - 1) // self._per_epoch)
        if not now.part.repeats:
            now.total = now.held + float(loss.detach()) * (now.weight or 1.0)
            now.held = now.total if self._held_back else now.held
        return loss

    def skip(self) -> None:
        """The backward pass of a batch that is to count nothing, whatever is in it."""
        nothing = torch.stack([p.flatten()[:1].sum() for p in self._guard.trained]).sum() * 0
        self.weigh(WeightedLoss(nothing, 0.0)).backward()

    def _take(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete, in the middle of a backward pass."""
        now = self._in_iteration("backward()")
        if self._apart is not None:
            return
        if now.computed:
            raise SpecError(
                "backward() was called twice for one batch of the loader. Add the losses up, or "
                "call all but the last inside session.no_sync()."
            )
        try:
            self._receive(now, slot, gradient)
        except PeerError as error:
            self._apart = error
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _receive(self, now: Iteration, slot: int, gradient: Tensor) -> None:
        """The gradient is the workers' to agree on."""
        if not now.begun:
            now.begun = True
            whole = self.engine.where.stop - self.engine.where.first
            factor = 0.0 if now.part.repeats else (now.weight or 1.0) / whole
            self.engine.begin_pass(now.part, factor, last=now.last and not self._held_back)
        self.engine.gradient(slot, gradient)

    def _backward_over(self) -> None:
        now, self._queued = self._now, False
        if now is None or self._held_back or self._apart is not None:
            return
        self._end_pass(now)
        if now.last:
            self._exchange_now()

    def _end_pass(self, now: Iteration) -> None:
        now.computed = True
        where = self.engine.where
        if not now.part.repeats:
            total = now.total
            self._losses[now.part.number] = Weighed(total, now.weight)
        share = 0.0 if now.part.repeats else now.samples / (where.stop - where.first)
        self.engine.end_pass(now.part, share)

    def _exchange_now(self) -> None:
        """The step's last backward pass is over: agree, and hand the gradients out."""
        self._guard.check_written(self.step)
        try:
            self._agree_on_step()
            if self._agreed is not None:
                self.member.check_lease()
                self.engine.hand_out()
                self._guard.check_zeros(self.step)
                self._norm, self._unscaled = self._update.clip(), self._update.clips
        except PeerError as error:
            self._apart, self._agreed = error, None
        self.phase = "your loop"

    def _agree_on_step(self) -> None:
        self._exchanged = True
        if not self._tells:
            self._warn(
                "the loop calls loss.backward() by itself, so the loss is not known: it is shown "
                "as 0, and no rule sees that it is not finite. Call session.backward(loss), or "
                "session.record(loss) before it"
            )
        with self._together(f"the exchange of the gradients of step {self.step}"):
            self._agreed = super()._exchange(Results(self._losses, self._skipped), self._share)

    def _exchange(self, passed: Results, share: Share) -> Agreement | None:
        """It was done when the last backward pass was over."""
        assert self._exchanged, "the last batch had no backward pass"
        return self._agreed

    def _commit(self) -> Commit:
        """It was done in `optimizer.step()`."""
        assert self._committed is not None, "optimizer.step() was not called"
        return self._committed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes meanwhile add to the gradient of the iteration, and do not end it."""
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last iteration of a step, with a gradient that is or will be agreed.

        After a last backward pass that is to come again there is none.
        """
        again = self._exchanged and self._agreed is None
        return self._now is not None and self._now.last and not again

    # ---- optimizer and scheduler

    def _users_iteration(self) -> int | None:
        """The present iteration's number, while the user's code runs in it."""
        return None if self._now is None or self._direct else self._now.number

    def _in_iteration(self, what: str) -> Iteration:
        if self._now is None:
            raise SpecError(
                f"{what} was called outside an iteration of the session's loader, where no "
                "sample's gradient counts. Call it within the loop over the loader."
            )
        return self._now

    @property
    def moves(self) -> bool:
        """Whether the step's gradient is agreed on, so that the optimizer is to move."""
        return self.sync_gradients and self._agreed is not None

    def optimizer_step(self, move: Callable[[], Any]) -> None:
        """The user's `optimizer.step()`, or `scaler.step(optimizer)`.

        Args:
            move: what it did before it was taken over.
        """
        if self._direct:
            move()
            return
        now = self._take_in_step()
        if now is None or not self.moves:
            return
        self._guard.check_trained()
        try:
            self._committed = self.engine.commit(lambda step: self._move(move, step))
            self._follow(self._committed.step)
        except PeerError as error:
            self._apart, self._agreed = error, None

    def _take_in_step(self) -> Iteration | None:
        """`optimizer.step()` was called: the iteration, unless the group came apart in it.

        Raises:
            SpecError: it cannot be called here.
        """
        now = self._in_iteration("optimizer.step()")
        if self.optimizer.__dict__.get("step") is not self._taken:
            raise SpecError(
                "a scheduler was made for the optimizer after prepare(), which does not know of "
                "it: it would be advanced in every iteration, and be in no checkpoint. Make it "
                "before, and give it to prepare() too."
            )
        if self._apart is not None:
            return None
        if now.stepped:
            raise SpecError(
                "optimizer.step() was called twice for one batch of the loader: a step takes "
                "train.global_batch samples and moves once. Call it once in every iteration."
            )
        if now.begun and not now.computed:  # its backward passes were all inside no_sync()
            self._end_pass(now)
            if now.last:
                self._exchange_now()
        now.stepped = now.computed
        return now

    def _move(self, move: Callable[[], Any], step: int) -> float | None:
        set_generators(key(self.job.seed, OF_UPDATE, step))  # some optimizers draw
        with self._directly():
            move()
            if self._advances:
                self.scheduler.step()
        return self._norm

    @contextmanager
    def _directly(self) -> Iterator[None]:
        """What is called of optimizer and scheduler does what it did before it was taken over."""
        self._direct = True
        try:
            yield
        finally:
            self._direct = False

    def unscale(self, original: Callable[..., Any]) -> None:
        """The user's `scaler.unscale_(optimizer)`: once, where there is a gradient."""
        if self._now is None or (self.moves and not self._unscaled):
            original(self.optimizer)
            self._unscaled = True

    def after_move(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's `scheduler.step()` or `scaler.update()`: once for each step that counts.

        Between two steps, such as after each epoch, every call counts; but one that is in the
        state already, which a checkpoint or another worker gave, is not made again, and none
        is where a stop has cut the epoch short.
        """
        if self._now is None:
            if self.stopped and self.step % self._per_epoch:  # the epoch is to be continued
                return None
            return original(*args, **kwargs) if self._update.between.is_new() else None
        now = self._now
        comes_again = self._exchanged and self._agreed is None
        if now.last and not now.stepped and not comes_again and self._apart is None:
            raise SpecError(
                f"step {self.step}: the scheduler's step() or the scaler's update() was called "
                "before optimizer.step(). Call it after, in every iteration."
            )
        return original(*args, **kwargs) if self._committed is not None else None

    def zeroed(self, *, to_none: bool) -> None:
        """The user's `optimizer.zero_grad(set_to_none)`."""
        self._guard.leaves_zeros = not to_none

    def scheduler_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's `scheduler.step()`."""
        if self._direct:
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
        """A plateau of a metric is found by every process alike, or the rates would differ.

        Raises:
            SpecError: the processes have other metrics, or it is called within a step.
        """
        if self._now is not None:
            raise SpecError(
                "the step() of ReduceLROnPlateau was called in an iteration: a metric is known "
                "after an evaluation. Call it after the loop over the loader."
            )
        mine = torch.tensor(float(metrics), dtype=torch.float64)

        def talk() -> list[float]:
            every = evaluation.exchange(self.engine.comm, self.device, _PLATEAU, Piece(0, [mine]))
            return [float(piece.leaves[0]) for piece in every]

        found = self._call(_PLATEAU, talk, [float(mine)])
        if len({*map(repr, found)}) > 1:
            raise SpecError(
                f"{_PLATEAU} was given {found[0]:g} in one process and "
                f"{next(n for n in found if repr(n) != repr(found[0])):g} in another: their "
                "learning rates would differ. Give the metric of the whole evaluation: "
                "session.gather_for_metrics and session.sum help to get it."
            )

    # ---- what the user tells

    def record(self, loss: float, weight: float | None = None) -> None:
        """Count the mean loss of the present batch, and how much it is a mean of."""
        now = self._in_iteration("record()")
        if now.begun:
            raise SpecError(
                "record() was called after backward(), at whose end the workers agree: call it "
                "before, or use session.backward(loss), which does both."
            )
        self._tells = True
        if not now.part.repeats:
            now.weight = (
                now.weight if weight is None else as_weight(weight, "the weight of record()")
            )
            now.total = loss * (now.weight or 1.0)

    # ---- what talks between two steps

    def sum(self, values: Sequence[float]) -> tuple[float, ...]:
        """The sums of numbers over the processes, the same bits on each in whatever order."""
        name = f"session.sum of {len(values)} values"
        own = torch.tensor(values, dtype=torch.float64)

        def talk() -> list[float]:
            every = evaluation.exchange(self.engine.comm, self.device, name, Piece(0, [own]))
            rows = [piece.leaves[0].tolist() for piece in every]
            return [_exact_sum(column) for column in zip(*rows, strict=True)]

        return tuple(self._call(name, talk, own.tolist()))

    def gather(self, tensors: Any) -> Any:
        """The tensors of all processes, each behind the other in the order of the dataset."""
        name, (leaves, form) = "session.gather_for_metrics", evaluation.flatten(tensors)
        now, number, expected = self.round, self.engine.comm.rank, None
        if now is not None:
            now.gathered, number, expected = True, now.number, now.expected
        elif self._now is not None and self._now.part.repeats:
            number = NONE

        def talk() -> list[Tensor]:
            piece = Piece(number, leaves)
            every = evaluation.exchange(self.engine.comm, self.device, name, piece)
            if expected is not None and {*expected} - {each.number for each in every}:
                raise _PartsMissing
            return evaluation.joined(every)

        every = self._call(name, talk, [leaf.cpu() for leaf in leaves])
        return evaluation.build_again([leaf.to(self.device) for leaf in every], form)

    def begin_evaluation(self) -> tuple[int, int]:
        """How many parts an evaluation has that begins now, and which of them is this process's."""
        if self._now is not None and self.member.recovers:
            raise self._within("an evaluation")

        def talk() -> int:
            comm, nothing = self.engine.comm, Piece(0, [])
            return len(evaluation.exchange(comm, self.device, EVALUATION, nothing))

        self._evaluates_since = time.perf_counter()
        parts = int(self._call(EVALUATION, talk, 1))
        return parts, self._calls.take_part(self.engine.comm.rank)

    def validated(self, samples: int, metrics: dict[str, float]) -> None:
        """Write down what a validation by the user gave, once, and judge it."""
        since, self._evaluates_since = self._evaluates_since, None
        took = time.perf_counter() - since if since is not None else 0.0

        def talk() -> list[bool]:
            comm = self.engine.comm
            if comm.rank == 0:
                self.member.emit(
                    "validated",
                    step=self.step,
                    epoch=max(0, self.step - 1) // self._per_epoch,
                    metrics=metrics,
                    samples=samples,
                    seconds=took,
                    scheduled=not self.stopped,
                )
            told = not self.stopped and self.stopping.after_validation(self.step, metrics)
            if self.member.recovers:  # a later worker is not to tell it again
                evaluation.exchange(comm, self.device, "session.validated", Piece(0, []))
            return [told]

        if self._now is not None and self.member.recovers:
            raise self._within("session.validated")
        (told,) = self._call("session.validated", talk, [False])
        if told and not self.stopped:
            self.after.end_by(ON_REQUEST)
            if self.state.last is None:  # of a step before this start of the run
                self.state.ended = True
            else:
                self.state.last = self.state.last._replace(told=True, ends=True)

    def _call(self, name: str, talk: Callable[[], Any], own: Any) -> Any:
        """What a call of the user's code that talks gives.

        Args:
            name: for errors.
            talk: with the others, in the present group.
            own: what it gives where the iteration is void, and will come again.

        Raises:
            SpecError: it cannot be made here.
            PeerError: another worker is lost, and nobody can take its place.
        """
        if self._now is not None:
            return self._call_within(name, talk, own)
        while True:
            known = self._calls.answered(name)
            if known is not None:
                return known.result
            try:
                with self._together(name):
                    result = talk()
            except PeerError as error:
                if not self.member.recovers:
                    raise
                self._meet_again(error)
            except _PartsMissing:
                self._wait_for_newcomer()
            else:
                if self.member.recovers:
                    self._calls.add(Call(name, result))
                return result

    def _call_within(self, name: str, talk: Callable[[], Any], own: Any) -> Any:
        """A call in an iteration: it comes again with the iteration, so nothing is kept."""
        assert self._now is not None
        if not self._now.last:
            raise SpecError(
                f"{name} was called in an iteration that is not the last of its step: another "
                "process may have fewer of them. Call it where session.sync_gradients is true."
            )
        if self.member.recovers and self._committed is not None:
            raise self._within(name)
        if self._apart is not None:
            return own
        try:
            with self._together(name):
                return talk()
        except PeerError as error:
            if not self.member.recovers:
                raise
            self._apart, self._agreed = error, None
            return own

    def _within(self, name: str) -> SpecError:
        when = "after its step was committed"
        if self._committed is None:
            when = "whose step is not committed (a loop that `break` has left is still in it)"
        return SpecError(
            f"{name} was called within an iteration, {when}: under instep run a worker that takes "
            "another's place does not come by there. Call it before optimizer.step(), or after "
            "the loop over the loader has come to its end."
        )

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """All processes are in the same place at the same time; if not, they wait in vain."""
        self.phase = "exchange"
        try:
            with self._waits_in.call(what, self.state.progress.step):
                yield
        finally:
            self.phase = "your loop"

    def _meet_again(self, error: PeerError | None) -> None:
        """Between two steps: leave the group, and be in the next."""
        if self._items is not None:
            self._items.close()
        self._leave(error)
        self._regroup()
        self._items = self.run()
        self.phase = "your loop"

    def _wait_for_newcomer(self) -> None:
        """Until the master has one, who takes the part of an evaluation that was lost."""
        comes = torch.zeros(1, device=self.device)
        self.phase = "exchange"
        try:
            while not comes.item():
                time.sleep(_LOOK_S)
                comes.fill_(float(self.member.regroups))
                self.engine.comm.all_reduce(comes).wait()
        except PeerError as error:
            self._meet_again(error)
        else:
            self._meet_again(None)

    @property
    def stopped(self) -> bool:
        """Whether no further step will come, although the loop may not be at its end."""
        return self.state.ended or (self.state.last is not None and self.state.last.ends)

    @property
    def in_flight(self) -> int:
        """The step that is being computed; 0 before there is a group."""
        return self.state.progress.step + 1 if self.engine.started else self.step

    @property
    def _begun(self) -> bool:
        """Whether some of the present step has been computed, and it has not been committed."""
        now = self._now
        begun = now is not None and (now.begun or bool(self._losses))
        return begun and self._committed is None

    def _left(self, why: str) -> SpecError:
        return SpecError(
            f"the loop was left in the middle of step {self.step}: {why}. Iterate to the "
            "end of the loader, use train.stop_after_steps, or leave when session.step is your "
            "last step."
        )

    # ---- the end

    def finish(self) -> bool:
        """Save, and leave together with the others.

        Returns:
            True.

        Raises:
            SpecError: the loop was left in the middle of a step, or others continue.
        """
        self._end_iteration()
        while True:
            self.step = self.state.progress.step
            try:
                agreed = None
                while agreed is None:  # others may have had a step, whose gradients did not fit
                    # a rule may have fired at the very last step
                    told = self.stopping.verdict()
                    with self._together("session.close()"):
                        agreed = self.engine.agree({}, stop=told, leaving=True)
                self._guard.compare(self.engine.comm)
                if agreed.stop and not self.stopped:
                    self.after.end_by(ON_REQUEST)
                self.after.save_last(self.step)
                if super().finish():
                    return True
            except PeerError as error:
                if not self.member.recovers:
                    raise
                self._leave(error)
                self._regroup()

    def _end_iteration(self) -> None:
        """Settle the step of an iteration that the loop was left in, or refuse to lose one."""
        if self._now is None or self.stopped or not (self._begun or self._exchanged):
            return
        if self._exchanged and self._agreed is None and self._apart is None:
            raise self._left(
                "its gradients did not fit the lattice of determinism = 'bits' and were to be "
                "computed once more"
            )
        if self._committed is None:
            raise self._left("its other batches were still to come")
        assert self._items is not None
        next(self._items)

    def close(self) -> None:
        """Let go of loader and group, and of the optimizer; a second call does nothing."""
        super().close()
        self._strangers.close()
        self._give_back()


class OwnLoader(AsLoader):
    """Iterates over this worker's batches of the next epoch; iterate again for the one after."""

    def __init__(self, loop: OwnLoop, dataset: Any) -> None:
        super().__init__(dataset)
        self._loop = loop

    @property
    def batch_size(self) -> int:
        """As of `AsLoader`."""
        return self._loop.largest()

    def __iter__(self) -> Iterator[Any]:
        return self._loop.epoch()

    def __len__(self) -> int:
        return self._loop.length()


def _exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once: the same in any order."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities
        return sum(values)
