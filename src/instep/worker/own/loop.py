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

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from instep.comm.base import Comm
from instep.comm.protocol.messages import ON_REQUEST, Heartbeat
from instep.data.batches import Batches
from instep.data.loader import Loader, Read
from instep.data.order import Position, key
from instep.data.reading.threads import cpu_clock
from instep.data.torch_loader import Unused
from instep.engine.member import Member
from instep.engine.passes import OF_PASS, Pass, Share, parts_of, share_of
from instep.engine.sections import after, of_epoch
from instep.engine.state.committed import Commit
from instep.engine.update import Update
from instep.errors import PeerError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.build import set_generators
from instep.recipe.optimizers.checks import check_optimizer, check_scheduler
from instep.state.retention import best_rule
from instep.worker.loop.loop import Loop
from instep.worker.own.backward import Backward
from instep.worker.own.checks import Guard, refuse, verdict_of
from instep.worker.own.iteration import Batch, Iteration, OwnStep
from instep.worker.own.optimizer_calls import OptimizerCalls
from instep.worker.own.shared_calls import SharedCalls
from instep.worker.own.strangers import Strangers
from instep.worker.passes.base import Dealt, Results


class OwnLoop(Loop):
    """What stands behind the loader, the optimizer and the scheduler of a user's own loop.

    Args:
        member: this worker's membership in the run.
        model: on its device.
        optimizer: of its parameters; `step` is taken over.
        scheduler: of the optimizer, or None; `step` is taken over.
        loader: of the dataset.
        batches: what each commit takes of it.
        scaler: of the loss, or None; `step`, `update` and `unscale_` are taken over.
        lost: what of the user's `DataLoader`s is not kept.
        advances: whether the scheduler is advanced after every step, and not by the user.

    Raises:
        SpecError: the job asks for what an own loop cannot give.
        RecipeError: the optimizer or the scheduler cannot be used.
    """

    _each_moves = False
    """Whether the optimizer moves in each iteration."""
    _backward_of: type[Backward] = Backward
    _calls_of: type[OptimizerCalls] = OptimizerCalls

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        loader: Loader,
        batches: Batches,
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
        self.present = OwnStep(each=self._each_moves)
        super().__init__(member, model, parameters, update, loader, batches, None, take=self._take)
        self._equip(scaler)
        self._cpu = cpu_clock()
        member.at = self._heartbeat
        self.compute = Dealt()
        self._items: Generator[Any] | None = None
        self._left_epoch = 0  # the step that ended the epoch the loader left last
        self._rests = False  # the loader's next epoch is what is left of the present one
        self._epoch_at: int | None = None  # that `epochs` gave last
        self._lost = lost
        self._guard = Guard(model, optimizer, alone=job.per_commit.micro_batches == 1)
        self._strangers = Strangers(model, lambda: self.present.users)
        self.shared = SharedCalls(
            member,
            self.engine,
            self.activity,
            self.after,
            self.present,
            per_epoch=self._per_epoch,
            meet=self._meet_again,
            too_early=self._too_early,
        )
        guard, strangers = self._guard, self._strangers
        self.backward = self._backward_of(
            self.engine, self.present, guard, strangers, lambda: self.calls.exchange()
        )
        self.after.end_by("own loop")
        self.engine.applies_staged = False  # the user's code edits the gradient before
        self.calls = self._make_calls(optimizer, scheduler, scaler)

    def _equip(self, scaler: torch.amp.GradScaler | None) -> None:
        """Get the engine ready, while the optimizer is still the user's own.

        Raises:
            SpecError: the job asks for what an own loop cannot give.
        """
        if self.engine.turn.strategy.laws:
            delayed, codec = "sync.options.delayed = true", f"sync.codec = {self.job.sync.codec!r}"
            asked = delayed if self.job.sync.delayed else codec
            raise SpecError(
                f"{asked} needs a recipe: in your own loop a step that "
                "another worker may have committed cannot be finished for you. Leave it out."
            )

    @property
    def _too_early(self) -> str:
        """Words for a call in the middle of a step, behind its name."""
        return (
            "was called in an iteration that is not the last of its step: another process may "
            "have fewer of them. Call it where session.sync_gradients is true."
        )

    def _make_update(self, job: JobSpec) -> Callable[..., Update]:
        """What moves the parameters."""
        return Update

    def _make_calls(self, *of_user: Any) -> OptimizerCalls:
        return self._calls_of(
            *of_user,
            engine=self.engine,
            update=self._update,
            step=self.present,
            backward=self.backward,
            guard=self._guard,
            shared=self.shared,
            seed=self.job.seed,
            per_epoch=self._per_epoch,
            advances=self._advances,
            agree=self._agree_on_step,
        )

    # ---- what a loop must say

    @property
    def _merge(self) -> bool:
        return self.job.train.merge == "always" and self.job.train.determinism != "bits"

    def _lengths(self) -> dict[str, int]:
        return {"train": self.samples}

    def _before_steps(self, comm: Comm) -> None:
        """There is nothing to try: the user runs the passes. What its code did between, is told."""
        self.shared.regroup(comm)

    @property
    def _per_epoch(self) -> int:
        return self.batches.per_epoch

    def _heartbeat(self) -> Heartbeat:
        # between two steps the user's code may take as long as it likes: that is progress too
        between = self.present.now is None and self.activity.phase == "your loop"
        return Heartbeat(
            step=self.step,
            steps=self._done,
            phase=self.activity.phase,
            progress=self.engine.passes.taken + (int(time.monotonic()) if between else 0),
            cpu_s=self._cpu(),
        )

    def join(self) -> None:
        """Form the group with the other workers, and get ready for the first batch.

        Raises:
            InstepError: the workers cannot train together.
        """
        began = time.time()
        self.member.recovers &= self.device.type == "cpu"  # NCCL waits long for who is gone
        self.member.interrupt, self.member.hold = self._interrupt, self.engine.records.hold
        self._loader.begin()
        self._regroup()
        self.member.phases["group"] = time.time() - began
        for lost in self._lost:
            self.announcer.warn(lost.text)
        if self.engine.comm.rank == 0 and not self.member.others_have_state:
            self.member.emit("same_as_one_machine", verdict=self._verdict())
        self.announcer.ready(self._loader, self.batches, 0, None)
        self._items = self.run()
        self._left_epoch = self.step
        self.activity.enter("your loop")

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
            if self.engine.state.over and not (fresh and self.step):
                return
            fresh = False
            if epoch != self._epoch_at:
                self._epoch_at = epoch
                self.shared.enter(of_epoch(epoch))
            yield epoch

    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch, or of what is left of this one.

        Raises:
            SpecError: the loop was left in the middle of a step, and comes back.
        """
        if self._rests:
            self._rests = False
            self.shared.enter(after(self.step))
            return
        if self._epoch_at is None and self.member.recovers:
            raise SpecError(
                "the loop over the loader is not within `for epoch in session.epochs():`, as it "
                "has to be under instep run: a worker that takes another's place begins there."
            )
        if self._begun and not self.engine.state.over:
            raise self._left("its other batches are still to come")
        assert self._items is not None, "join() comes first"
        for item in self._items:
            if isinstance(item, Batch):
                self.activity.enter("your loop")
                yield item.value
            elif item.ends_epoch and item.number > self._left_epoch:
                self._left_epoch = item.number
                self.activity.enter("your loop")
                return
        self.activity.enter("your loop")
        if self.step:
            self.shared.enter(after(self.step))

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
            now = self.present.enter(Iteration(part, read.size, last=following is None))
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number))
            since = time.perf_counter()
            yield Batch(read.batch)
            self.present.leave()
            if now.begun and not now.computed and not now.last:  # all of it inside no_sync()
                self.backward.end(now)
            self._refuse_half_done(now)
            self.engine.clock.lap(since, "forward")
        return Results(self.present.losses, self.present.skipped)

    def _begin(self, share: Share) -> None:
        """The iterations of a step are about to come."""
        self.present.begin(share)
        self.backward.begin_step()
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
            self.present.skipped.extend(read.skipped)
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

    # ---- a step

    def _take(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete, in the middle of a backward pass."""
        self.backward.take(slot, gradient)

    def _agree_on_step(self) -> None:
        """Ask the workers to agree on the step.

        Raises:
            PeerError: one was lost, or this one is no longer among them.
        """
        if not self.backward.tells:
            self.announcer.warn(
                "the loop calls loss.backward() by itself, so the loss is not known: it is shown "
                "as 0, and no rule sees that it is not finite. Call session.backward(loss), or "
                "session.record(loss) before it"
            )
        step = self.present
        passed = Results(step.losses, step.skipped)
        with self.shared.together(f"the exchange of the gradients of step {self.step}"):
            step.agree(partial(self._exchange, passed, step.share))
        if step.agreed is not None:
            self.member.lease.check()

    def _one_turn(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Batch, None, Commit]:
        """The user's code has the workers agree, in its last backward pass, and commits."""
        self.engine.begin_step(self.step, where)
        yield from self._passes(where, share, loads)
        if self.present.comes_again:  # gradients exceeded the lattice: once more, on a coarser one
            again = self._loader.read(self.compute.slices(share), self._record)
            self.engine.begin_step(self.step, where)
            yield from self._passes(where, share, again)
        agreed, done = self.present.agreed, self.present.committed
        assert agreed is not None, "a strategy wanted a third attempt"
        assert done is not None, "optimizer.step() was not called"
        self._regroups = agreed.regroups
        self.activity.enter("update")
        self.announcer.commit(done, self._comms[1], warns=not self.after.stopping.spec.non_finite)
        if done.step % self._per_epoch == 0:  # not where it is settled again: a newcomer rests then
            self._guard.compare(self.engine.comm)
        return done

    def _meet_again(self, error: PeerError | None) -> None:
        """Between two steps: leave the group, and be in the next."""
        if self._items is not None:
            self._items.close()
        self._leave(error)
        self._regroup()
        self._items = self.run()
        self.activity.enter("your loop")

    @property
    def in_flight(self) -> int:
        """The step that is being computed; 0 before there is a group."""
        return self.engine.state.progress.step + 1 if self.engine.started else self.step

    @property
    def _begun(self) -> bool:
        """Whether some of the present step has been computed, and it has not been committed."""
        return self.present.begun

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
            self.step = self.engine.state.progress.step
            try:
                agreed = None
                while agreed is None:  # others may have had a step, whose gradients did not fit
                    # a rule may have fired at the very last step
                    told = self.after.stopping.verdict()
                    with self.shared.together("session.close()"):
                        agreed = self.engine.agree({}, stop=told, leaving=True)
                self._guard.compare(self.engine.comm)
                if agreed.stop and not self.engine.state.over:
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
        step = self.present
        if step.now is None or self.engine.state.over or not (self._begun or step.exchanged):
            return
        if step.comes_again and step.apart is None:
            raise self._left(
                "its gradients did not fit the lattice of determinism = 'bits' and were to be "
                "computed once more"
            )
        if step.committed is None:
            raise self._left("its other batches were still to come")
        assert self._items is not None
        next(self._items)

    def close(self) -> None:
        """Let go of loader and group, and of the optimizer; a second call does nothing."""
        super().close()
        self._strangers.close()
        self.calls.give_back()
