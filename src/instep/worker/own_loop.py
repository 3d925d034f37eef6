"""The user's own training loop: what stands behind its loader and its optimizer.

The loop stays an ordinary one. Each batch of the loader is announced to the
replica, `optimizer.step()` ends a pass, and the last pass of a step agrees,
moves the parameters and commits, as `training.py` does for a recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.comm.messages import NOT_FINITE, TOLD, Heartbeat
from instep.data.loader import Loader, Read, Skipped
from instep.data.order import Position, key, position, steps_in_epoch
from instep.errors import PeerError, SpecError
from instep.recipe.build import check_optimizer, check_scheduler, set_generators
from instep.spec import StartSpec
from instep.state.retention import best_rule
from instep.sync.base import make_strategy
from instep.system.addresses import address_towards
from instep.worker.member import Member
from instep.worker.passes import OF_PASS, Pass, Share, plan
from instep.worker.replica import Replica, Weighed, check_lengths, make_comm
from instep.worker.saving import Saver, taken_up
from instep.worker.skipping import Teller
from instep.worker.stopping import Stopping
from instep.worker.update import Update


class OwnLoop:
    """What stands behind the loader and the optimizer of a user's own loop."""

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        loader: Loader,
        samples: int,
    ) -> None:
        self._member, self.optimizer = member, optimizer
        self._loader, self.samples, self.job = loader, samples, member.job
        self.step, self.doing = 0, "preparing"
        self._replica: Replica | None = None
        self._rule: str | None = None  # why training stopped before the loop's own end
        self._in_pass = self._again = False
        self._finite = True  # the last loss
        if self.job.train.precision != "float32":
            raise SpecError(
                f"train.precision = {self.job.train.precision!r}: your own loop casts by itself. "
                "Leave the key out, and use torch.autocast around your forward pass."
            )
        best_rule(self.job.checkpoint, ())  # your validation is not seen from here
        if self.job.start != StartSpec():
            raise SpecError(
                "[start] is set, but your own loop makes model and optimizer. Leave it out; load "
                "with instep.load_model(path, model), and freeze with requires_grad_(False)."
            )
        if self.job.check.corruption:
            raise SpecError(
                "check.corruption = true: your own loop runs its passes by itself, so none can be "
                "computed twice. Leave it out."
            )
        if self.job.check.strict:
            raise SpecError(
                "check.strict = true: your own loop runs its passes by itself, so nothing can be "
                "tried, and it is not shown that the run gives the result of one machine. Leave it "
                "out, or train a recipe."
            )
        check_optimizer(optimizer, model)
        check_scheduler(scheduler)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._update = Update(
            optimizer,
            scheduler,
            parameters,
            seed=self.job.seed,
            max_grad_norm=self.job.train.max_grad_norm,
            measure=self.job.stop.by_norm,
            scaler=torch.amp.GradScaler("cuda", enabled=False),
        )
        self._model, self._parameters = model, parameters

    def join(self) -> None:
        """Form the group with the other workers, and get ready for the first batch.

        Raises:
            InstepError: the workers cannot train together.
        """
        member, model, parameters = self._member, self._model, self._parameters
        before = taken_up(member.checkpoint, model, self._update)
        self.step = before.step
        member.at = lambda: Heartbeat(step=self.in_flight, phase=self.doing)
        member.wait_for_group()
        device = parameters[0].device
        comm = make_comm(member, device, address_towards(member.master_host))
        member.interrupt = comm.interrupt
        if member.superseded:  # the run has ended before there was anything to interrupt
            raise PeerError("the run has ended while the group was forming.")
        check_lengths(comm, device, train=self.samples)
        strategy = make_strategy(self.job.sync.name, self.job.sync.options)
        strategy.load_state(before.strategy)
        self._replica = Replica(member, model, parameters, strategy, comm)
        member.hold = self._replica.hold
        self._saver = Saver(member, model, self._update) if comm.rank == 0 else None
        self._stopping = Stopping(member, comm, device)
        exact = self.job.train.determinism == "bits"
        self._merge = self.job.train.merge != "never" and not exact
        self._where = Position(0, 0, 0)
        if self.step:  # nothing may follow it but the end
            self._where = position(self.step, self.samples, self.job.train.global_batch)
        self._losses: dict[int, Weighed] = {}  # of each pass of the step
        self._teller = Teller(member)
        self._skipped: list[Skipped] = []  # samples of its passes that could not be read
        self._count = 0  # samples of the present pass that were
        self._pending: list[Pass] = []
        self._share = Share([], 0, 0)
        member.emit(
            "worker_ready",
            worker=member.number,
            device=str(device),
            threads=torch.get_num_threads(),
            parameters=sum(p.numel() for p in parameters),
            samples=self.samples,
            validation_samples=0,
            last_step=None,
            loader=f"{self._loader.mode}: {self._loader.why}",
            phases=member.phases,
        )
        self.doing = "your loop"

    @property
    def replica(self) -> Replica:
        """This worker's copy of the model; there once the group has formed."""
        assert self._replica is not None, "join() comes first"
        return self._replica

    @property
    def in_flight(self) -> int:
        """The step that is being computed; 0 before there is a group."""
        return self.step + 1 if self._replica is not None else 0

    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch, or of what is left of this one.

        Raises:
            SpecError: the loop was left in the middle of a step, and comes back.
        """
        if self._begun and not self.stopped:
            raise self._left("its other batches are still to come")
        per_epoch = steps_in_epoch(self.samples, self.job.train.global_batch)
        last = (self.step // per_epoch + 1) * per_epoch
        loads = self._loader.read(
            part.samples for _, share in self._plan(last) for part in share.passes
        )
        for where, share in self._plan(last):
            if self._rule is not None:
                break
            self._where, self._share, self._pending = where, share, list(share.passes)
            if not share.passes:
                self.commit()  # nothing to compute here, but the others wait for us
            yield from self._passes(loads)
            if self._again:
                yield from self._once_more()
        loads.close()

    def _once_more(self) -> Iterator[Any]:
        """The batches of the present step again: its gradients did not fit the lattice."""
        self._pending = list(self._share.passes)
        if not self._pending:
            self.commit()
        yield from self._passes(self._loader.read(part.samples for part in self._share.passes))

    def _passes(self, loads: Iterator[Read]) -> Iterator[Any]:
        """The batch of each pass that is still to be run in this step."""
        while self._pending:
            read = self._next(loads)
            if read.size:
                yield read.batch

    def length(self) -> int:
        """Batches that this worker has in a whole epoch."""
        comm = self.replica.comm
        steps = steps_in_epoch(self.samples, self.job.train.global_batch)
        (_, whole), *_ = plan(self.job, self.samples, 1, 1, comm, merge=self._merge)
        (_, last), *_ = plan(self.job, self.samples, steps, steps, comm, merge=self._merge)
        return (steps - 1) * len(whole.passes) + len(last.passes)

    def _plan(self, last: int) -> Iterator[tuple[Position, Share]]:
        comm = self.replica.comm
        return plan(self.job, self.samples, self.step + 1, last, comm, merge=self._merge)

    def _next(self, loads: Iterator[Read]) -> Read:
        since = time.perf_counter()
        read = next(loads)
        self._since = self.replica.clock.lap(since, "load")
        self._skipped += read.skipped
        self._count = read.size
        if not read.size:  # no sample, no pass
            self._pass_over()
            return read
        part = self._pending[0]
        set_generators(key(self.job.seed, OF_PASS, self.step + 1, part.number))
        self.replica.begin_pass(part, self._weight, last=len(self._pending) == 1)
        self._in_pass = True
        return read

    @property
    def _weight(self) -> float:
        """What the present pass counts in its step."""
        return self._count / (self._where.stop - self._where.first)

    def record(self, loss: float) -> None:
        """Count the loss of the present pass."""
        if not self._in_pass:
            raise SpecError("record() was called after optimizer.step(): call it before.")
        part = self._pending[0]
        self._losses[part.number] = Weighed(loss * self._count, self._count)

    @property
    def stopped(self) -> bool:
        """Whether no further step will come, although the loop may not be at its end."""
        return self._rule is not None

    def validated(self, samples: int, metrics: dict[str, float]) -> None:
        """Write down what a validation by the user gave, once, and judge it."""
        if self.replica.comm.rank == 0:
            self._member.emit(
                "validated",
                step=self.step,
                epoch=self._where.epoch,
                metrics=metrics,
                samples=samples,
                seconds=0.0,
                scheduled=not self.stopped,
            )
        if not self.stopped and self._stopping.after_validation(self.step, metrics):
            self._rule = TOLD

    def pass_done(self) -> None:
        """The user's `optimizer.step()`: the present pass is over, and maybe the step."""
        if not self._in_pass:
            raise SpecError("optimizer.step() was called twice for one batch of the loader.")
        self._in_pass = False
        part = self._pending[0]
        self._losses.setdefault(part.number, Weighed(0.0, self._count))
        self.replica.clock.lap(self._since, "forward")
        self.replica.end_pass(part, self._weight)
        self._pass_over()

    def _pass_over(self) -> None:
        self._pending.pop(0)
        if not self._pending:
            self.commit()

    def commit(self) -> None:
        """Agree, move the parameters, and let the step count."""
        replica, share, where = self.replica, self._share, self._where
        skipped, self._skipped = self._skipped, []
        self._teller.tell(skipped, dataset="training", step=self.in_flight, epoch=where.epoch)
        agreed = replica.agree(
            self._losses,
            stop=self._stopping.told(self.in_flight),
            skipped=len(skipped),
            samples=where.stop - where.first,
        )
        self._losses, self._again = {}, agreed is None
        if agreed is None:
            return
        self.step += 1
        samples = share.stop - share.first
        norm = replica.advance(self._update, self.step, where, samples, agreed.loss)
        self._finite = math.isfinite(agreed.loss)
        if why := self._stopping.not_finite(agreed.loss, norm):
            self._rule, self._finite = NOT_FINITE, False
            self._stopping.tell_of(why, self.step)
        elif agreed.stop:
            self._rule = TOLD
        elif self.step == self.job.train.stop_after_steps:
            self._rule = "stop_after_steps"
        self._stopping.after_commit(self.step, agreed.loss, norm, last=self.stopped)
        self._save(last=False)

    def _save(self, *, last: bool) -> None:
        if self._saver is not None and not self._stopping.spoilt:
            self._saver.after_step(self.step, self._where, self.replica, last=last)

    @property
    def _begun(self) -> bool:
        """Whether some of the present step's passes have been computed, and some have not."""
        some_done = 0 < len(self._pending) < len(self._share.passes)
        return some_done or bool(self._losses and self._pending)

    def _left(self, why: str) -> SpecError:
        return SpecError(
            f"the loop was left in the middle of step {self.in_flight}: {why}. Go on to the end of "
            "the loader, use train.stop_after_steps, or leave when session.step is your last step."
        )

    def _check_whole(self) -> None:
        """Refuse to lose a step whose computation has begun, unless all were told to stop."""
        if self.stopped:
            return
        if self._again:
            raise self._left(
                "its gradients did not fit the lattice of determinism = 'bits' and were to be "
                "computed once more"
            )
        if self._begun:
            raise self._left("its other batches were still to come")

    def finish(self) -> None:
        """Save, and leave together with the others.

        Raises:
            SpecError: the loop was left in the middle of a step, or others go on.
        """
        self._check_whole()
        agreed = None
        while agreed is None:  # others may have had a step, whose gradients did not fit
            # a rule may have fired at the very last step
            agreed = self.replica.agree({}, stop=self._stopping.verdict(), leaving=True)
        if agreed.stop and not self.stopped:
            self._rule = TOLD
        self._save(last=True)
        if self._saver is not None:
            self._saver.finish(self.step)
        self._member.done(self.step, self._rule or "own loop", finite=self._finite)
        self.close()

    def close(self) -> None:
        """Let go of loader and group; a second call does nothing."""
        self._loader.close()
        if self._replica is not None:
            self._replica.close()


class OwnLoader:
    """Iterates over this worker's batches of the next epoch; iterate again for the one after."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return self._loop.epoch()

    def __len__(self) -> int:
        return self._loop.length()


class OwnOptimizer:
    """The user's optimizer, whose `step` is the whole run's."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def step(self) -> None:
        """Agree with the other workers, move the parameters, commit."""
        self._loop.pass_done()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are taken away as they arrive; there is nothing to clear."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.optimizer, name)
