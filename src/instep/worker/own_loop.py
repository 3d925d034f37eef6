"""The user's own training loop, by the conventions of Accelerate.

The loop stays an ordinary one. An iteration is one pass: a micro-batch, unless
`train.merge` joins them. Gradients are taken as a backward pass completes them. When
the backward pass of a step's last iteration is over, the workers agree and
every `.grad` holds the agreed gradient, so clipping and edits see it; then
`optimizer.step()` moves the parameters and commits. In all other iterations
`optimizer.step()` and `scheduler.step()` do nothing.

Where a worker is lost, nothing is raised into the user's code: what is left of the
iteration does nothing, and the loader gives the step's batches once more.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.comm.base import Comm
from instep.comm.messages import TOLD, Heartbeat
from instep.data.loader import Loader, Read, Skipped
from instep.data.order import Position, key, position, steps_in_epoch
from instep.data.reading.threads import cpu_clock
from instep.errors import PeerError, SpecError
from instep.recipe.build import check_optimizer, check_scheduler, set_generators
from instep.recipe.weights import WeightedLoss, as_weight
from instep.spec import JobSpec, StartSpec
from instep.state.retention import Best, best_rule
from instep.worker.committed import Commit
from instep.worker.engine import Agreement, Weighed
from instep.worker.loop import Loop, Passed
from instep.worker.member import Member
from instep.worker.passes import OF_PASS, Pass, Share, parts_of, share_of
from instep.worker.update import OF_UPDATE, Update


class Batch(NamedTuple):
    """What one iteration of the user's loop gets."""

    value: Any


class _Iteration:
    """The present iteration of the user's loop."""

    def __init__(self, part: Pass, samples: int, *, last: bool) -> None:
        self.part, self.samples, self.last = part, samples, last
        self.weight = 0.0 if part.repeats else float(samples)
        self.total = 0.0
        self.begun = self.computed = self.stepped = False


class OwnLoop(Loop):
    """What stands behind the loader, the optimizer and the scheduler of a user's own loop.

    Args:
        member: this worker's membership in the run.
        model: on its device.
        optimizer: of its parameters; `step` is taken over.
        scheduler: of the optimizer, or None; `step` is taken over.
        scaler: of the loss, or None; `step`, `update` and `unscale_` are taken over.
        loader: of the dataset.
        samples: in it.

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
    ) -> None:
        job = member.job
        if job.train.batch_norm == "global":
            raise SpecError(
                "train.batch_norm = 'global' needs a recipe: in your own loop nobody knows which "
                "pass a layer is in. Leave it out."
            )
        _refuse(job)
        best_rule(job.checkpoint, ())  # your validation is not seen from here
        check_optimizer(optimizer, model)
        check_scheduler(scheduler)
        parameters = [p for p in model.parameters() if p.requires_grad]
        update = Update(
            optimizer,
            scheduler,
            parameters,
            seed=job.seed,
            max_grad_norm=job.train.max_grad_norm,
            measure=job.stop.by_norm,
            scaler=scaler or torch.amp.GradScaler("cuda", enabled=False),
        )
        super().__init__(member, model, parameters, update, loader, samples, None)
        if self.engine.strategy.laws:
            raise SpecError(
                f"sync.codec = {job.sync.codec!r} needs a recipe: in your own loop a step that "
                "another worker may have committed cannot be finished for you. Leave it out."
            )
        self._cpu = cpu_clock()
        member.at = lambda: Heartbeat(
            step=self.step,
            steps=self._done,
            phase=self.phase,
            progress=self.engine.taken,
            cpu_s=self._cpu(),
        )
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self._now: _Iteration | None = None
        self._losses: dict[int, Weighed] = {}
        self._skipped: list[Skipped] = []
        self._share = Share([], 0, 0)
        self._agreed: Agreement | None = None
        self._norm: float | None = None
        self._committed: Commit | None = None
        self._apart: PeerError | None = None  # the group came apart within an iteration
        self._exchanged = self._held_back = False
        self._items: Iterator[Any] | None = None
        self._left_epoch = 0  # the step that ended the epoch the loader left last
        self._queued = False  # a callback at the end of the present backward pass
        self._direct = False  # the optimizer is to move now, whoever calls it
        self._unscaled = False
        self._rests = False  # the loader's next epoch is what is left of the present one
        self.rule = "own loop"
        self.engine.take = self._take
        self._give_back = _take_over(self)

    # ---- what a loop must say

    @property
    def _merge(self) -> bool:
        return self.job.train.merge == "always" and self.job.train.determinism != "bits"

    def _lengths(self) -> dict[str, int]:
        return {"train": self.samples}

    def _before_steps(self, comm: Comm) -> None:
        """There is nothing to try: the user runs the passes."""

    def _best(self) -> Best | None:
        return None

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
        self._announce(validation_samples=0)
        self._items = self.run()
        self._left_epoch = self.step
        self.phase = "your loop"

    # ---- the loader

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """The epochs from the one that the run is in, up to `count` in all.

        A run that was stopped, or a worker that takes another's place, is in the epoch of its
        last step, even if nothing of it is left.
        """
        per_epoch = steps_in_epoch(self.samples, self.job.train.global_batch)
        first = max(0, self.step - 1) // per_epoch
        self._rests = self.step > 0 and self.step % per_epoch == 0
        count = self.job.train.passes if count is None else count
        for epoch in range(first, count):
            if self.stopped:
                return
            yield epoch

    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch, or of what is left of this one.

        Raises:
            SpecError: the loop was left in the middle of a step, and comes back.
        """
        if self._rests:
            self._rests = False
            return
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

    def length(self) -> int:
        """Batches that this worker has in a whole epoch."""
        steps = steps_in_epoch(self.samples, self.job.train.global_batch)
        planned = self.engine.assignment.plan(1, steps, merge=self._merge)
        sizes = [max(1, len(share.passes)) for _, share in planned]
        return sum(sizes)

    def _passes(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Batch, None, Passed]:
        self._share = share
        self._losses, self._skipped, self._agreed = {}, [], None
        self._apart, self._exchanged, self._committed = None, False, None
        self._unscaled = self._queued = False
        reads = self._readable(where, share, loads)
        following = next(reads, None)
        while following is not None:
            (part, read), following = following, next(reads, None)  # which is the last is known
            if self.member.superseded:
                raise PeerError("the members have changed in the middle of a step.")
            now = self._now = _Iteration(part, read.size, last=following is None)
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number))
            since = time.perf_counter()
            yield Batch(read.batch)
            self._now = None
            self._raise_apart()
            self._refuse_half_done(now)
            self.engine.clock.lap(since, "forward")
        return Passed(self._losses, self._skipped)

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

    def _refuse_half_done(self, now: _Iteration) -> None:
        """Every iteration is one backward pass and one `optimizer.step()`."""
        if not now.computed:
            raise SpecError(
                f"step {self.step}: a batch of the loader had no backward pass, so its samples "
                "would count without having been trained on. Call loss.backward() for every "
                "batch (multiply the loss by 0 where it is not to count)."
            )
        if now.last and not now.stepped:
            raise SpecError(
                f"step {self.step}: optimizer.step() was not called for its last batch. Call it in "
                "every iteration; where session.sync_gradients is False it does nothing. How many "
                "batches make a step is set by train.micro_batches."
            )

    # ---- the backward pass

    def weigh(self, loss: Tensor | WeightedLoss) -> Tensor:
        """The loss to call `backward` on, with its weight noted.

        Args:
            loss: the mean over the batch; or a total and what it is a total of.
        """
        now = self._in_iteration("backward()")
        if isinstance(loss, WeightedLoss):
            weight = as_weight(loss.weight, "the weight of backward()")
            if not now.part.repeats:
                now.weight = weight
            loss = loss.total / (weight or 1.0)
        if not now.part.repeats:
            now.total = float(loss.detach()) * (now.weight or 1.0)
        return loss

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
            if not now.begun:
                now.begun = True
                whole = self.engine.where.stop - self.engine.where.first
                factor = 0.0 if now.part.repeats else (now.weight or 1.0) / whole
                self.engine.begin_pass(now.part, factor, last=now.last and not self._held_back)
            self.engine.gradient(slot, gradient)
        except PeerError as error:
            self._apart = error
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        now, self._queued = self._now, False
        if now is None or self._held_back or self._apart is not None:
            return
        self._end_pass(now)
        if now.last:
            self._exchange_now()

    def _end_pass(self, now: _Iteration) -> None:
        now.computed = True
        where = self.engine.where
        if not now.part.repeats:
            total = now.total
            self._losses[now.part.number] = Weighed(total, now.weight)
        share = 0.0 if now.part.repeats else now.samples / (where.stop - where.first)
        self.engine.end_pass(now.part, share)

    def _exchange_now(self) -> None:
        """The step's last backward pass is over: agree, and hand the gradients out."""
        self._exchanged = True
        try:
            passed = Passed(self._losses, self._skipped)
            self._agreed = super()._exchange(passed, self._share)
            if self._agreed is not None:
                self.member.check_lease()
                self.engine.hand_out()
                self._norm, self._unscaled = self._update.clip(), self._update.clips
        except PeerError as error:
            self._apart, self._agreed = error, None
        self.phase = "your loop"

    def _exchange(self, passed: Passed, share: Share) -> Agreement | None:
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
        """Whether this is the last iteration of a step."""
        return self._now is not None and self._now.last

    # ---- optimizer and scheduler

    def _in_iteration(self, what: str) -> _Iteration:
        if self._now is None:
            raise SpecError(f"{what} was called outside an iteration of the session's loader.")
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
        now = self._in_iteration("optimizer.step()")
        if self._apart is not None:
            return
        if now.stepped:
            raise SpecError("optimizer.step() was called twice for one batch of the loader.")
        if now.begun and not now.computed:  # its backward passes were all inside no_sync()
            self._end_pass(now)
            if now.last:
                self._exchange_now()
        now.stepped = now.computed
        if not self.moves:
            return
        try:
            self._committed = self.engine.commit(lambda step: self._move(move, step))
        except PeerError as error:
            self._apart, self._agreed = error, None

    def _move(self, move: Callable[[], Any], step: int) -> float | None:
        set_generators(key(self.job.seed, OF_UPDATE, step))  # some optimizers draw
        self._direct = True
        try:
            move()
        finally:
            self._direct = False
        return self._norm

    def unscale(self, original: Callable[..., Any]) -> None:
        """The user's `scaler.unscale_(optimizer)`: once, where there is a gradient."""
        if self._now is None or (self.moves and not self._unscaled):
            original(self.optimizer)
            self._unscaled = True

    def after_move(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's `scheduler.step()` or `scaler.update()`: once for each step that counts."""
        if self._now is None or self._committed is not None:
            return original(*args, **kwargs)
        return None

    # ---- what the user tells

    def record(self, loss: float, weight: float | None = None) -> None:
        """Count the mean loss of the present batch, and how much it is a mean of."""
        now = self._in_iteration("record()")
        if now.begun:
            raise SpecError(
                "record() was called after backward(), at whose end the workers agree: call it "
                "before, or use session.backward(loss), which does both."
            )
        if not now.part.repeats:
            now.weight = (
                now.weight if weight is None else as_weight(weight, "the weight of record()")
            )
            now.total = loss * (now.weight or 1.0)

    def validated(self, samples: int, metrics: dict[str, float]) -> None:
        """Write down what a validation by the user gave, once, and judge it."""
        if self.engine.comm.rank == 0:
            per_epoch = steps_in_epoch(self.samples, self.job.train.global_batch)
            self.member.emit(
                "validated",
                step=self.step,
                epoch=max(0, self.step - 1) // per_epoch,
                metrics=metrics,
                samples=samples,
                seconds=0.0,
                scheduled=not self.stopped,
            )
        if not self.stopped and self.stopping.after_validation(self.step, metrics):
            assert self.state.last is not None
            self.state.last = self.state.last._replace(told=True, ends=True)
            self.rule = TOLD

    @property
    def stopped(self) -> bool:
        """Whether no further step will come, although the loop may not be at its end."""
        return self.state.ended or (self.state.last is not None and self.state.last.ends)

    @property
    def in_flight(self) -> int:
        """The step that is being computed; 0 before there is a group."""
        return self.step + 1 if self.engine.started and self._now is None else self.step

    @property
    def _begun(self) -> bool:
        """Whether some of the present step has been computed, and it has not been committed."""
        now = self._now
        begun = now is not None and (now.begun or bool(self._losses))
        return begun and self._committed is None

    def _left(self, why: str) -> SpecError:
        return SpecError(
            f"the loop was left in the middle of step {self.step}: {why}. Go on to the end of "
            "the loader, use train.stop_after_steps, or leave when session.step is your last step."
        )

    # ---- the end

    def finish(self) -> bool:
        """Save, and leave together with the others.

        Returns:
            True.

        Raises:
            SpecError: the loop was left in the middle of a step, or others go on.
        """
        self._end_iteration()
        while True:
            self.step = self.state.progress.step
            try:
                agreed = None
                while agreed is None:  # others may have had a step, whose gradients did not fit
                    # a rule may have fired at the very last step
                    told = self.stopping.verdict()
                    agreed = self.engine.agree({}, stop=told, leaving=True)
                if agreed.stop and not self.stopped:
                    self.rule = TOLD
                self._save_last()
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

    def _save_last(self) -> None:
        own = self.engine.own_state() if self.engine.strategy.laws else {}
        if self._saver is not None and not self.stopping.spoilt:
            where = Position(0, 0, 0)
            if self.step:  # nothing may follow it but the end
                where = position(self.step, self.samples, self.job.train.global_batch)
            self._saver.after_step(self.engine, where, due=True, last=True, own=own)

    def close(self) -> None:
        """Let go of loader and group, and of the optimizer; a second call does nothing."""
        super().close()
        self._give_back()


class OwnLoader:
    """Iterates over this worker's batches of the next epoch; iterate again for the one after."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return self._loop.epoch()

    def __len__(self) -> int:
        return self._loop.length()


def _take_over(loop: OwnLoop) -> Callable[[], None]:
    """Have `optimizer.step` and its kin go through the loop; returns what undoes it."""
    optimizer, scheduler, scaler = loop.optimizer, loop.scheduler, loop.scaler
    before: list[tuple[Any, str, Any]] = []

    def take(owner: Any, name: str, ours: Callable[..., Any]) -> Any:
        raw = getattr(owner, name)
        before.append((owner, name, owner.__dict__.get(name)))
        # the attributes too: a scheduler made before has marked the method
        wrapped = functools.wraps(getattr(raw, "__func__", raw))(ours)
        setattr(owner, name, MethodType(wrapped, owner))
        return raw

    def step(_: Any, closure: Any = None) -> None:
        if closure is not None:
            raise SpecError(
                "optimizer.step(closure): the workers agree on the gradient before the optimizer "
                "moves, so it cannot ask for another. Compute the loss in the loop, call "
                "backward(), then optimizer.step()."
            )
        loop.optimizer_step(raw_step)

    raw_step = take(optimizer, "step", step)
    if scheduler is not None:

        def advance(_: Any, *args: Any, **kwargs: Any) -> Any:
            return loop.after_move(raw_advance, *args, **kwargs)

        raw_advance = take(scheduler, "step", advance)
    if scaler is not None:

        def scaled_step(_: Any, moved: Any, *args: Any, **kwargs: Any) -> None:
            loop.optimizer_step(lambda: raw_scaled(moved, *args, **kwargs))

        def update(_: Any, *args: Any, **kwargs: Any) -> Any:
            return loop.after_move(raw_update, *args, **kwargs)

        def unscale(_: Any, optimizer: Any) -> None:
            loop.unscale(raw_unscale)

        raw_scaled, raw_update, raw_unscale = (
            take(scaler, "step", scaled_step),
            take(scaler, "update", update),
            take(scaler, "unscale_", unscale),
        )

    def give_back() -> None:
        while before:
            owner, name, was = before.pop()
            if was is None:
                delattr(owner, name)
            else:
                setattr(owner, name, was)

    return give_back


def _refuse(job: JobSpec) -> None:
    """What an own loop cannot give.

    Raises:
        SpecError: the job asks for it.
    """
    if job.train.precision != "float32":
        raise SpecError(
            f"train.precision = {job.train.precision!r}: your own loop casts by itself. "
            "Leave the key out, and use torch.autocast around your forward pass."
        )
    if job.start != StartSpec():
        raise SpecError(
            "[start] is set, but your own loop makes model and optimizer. Leave it out; load "
            "with instep.load_model(path, model), and freeze with requires_grad_(False)."
        )
    if job.sync.participants:
        raise SpecError(
            f"sync.name = {job.sync.name!r}: your own loop takes its steps by itself, so it "
            "cannot compute the steps of several participants. Train a recipe."
        )
    if job.check.corruption:
        raise SpecError(
            "check.corruption = true: your own loop runs its passes by itself, so none can be "
            "computed twice. Leave it out."
        )
    if job.check.strict:
        raise SpecError(
            "check.strict = true: your own loop runs its passes by itself, so nothing can be "
            "tried, and it is not shown that the run gives the result of one machine. Leave it "
            "out, or train a recipe."
        )
