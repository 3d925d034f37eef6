"""One worker's training of a recipe, from the first sample to the saved model.

`Training.steps` is the loop: load, passes, agree, update, commit, once for
each step of the job. Every worker runs it in lockstep; what must happen on
all of them at the same step (stop, validate) follows from the step's number
or from what was agreed in it. Only where a rule of `[stop]` looks at figures
does worker 0 wait for word from the master (`stopping.py`).
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

import torch

from instep.comm.base import Comm
from instep.comm.messages import NOT_FINITE, TOLD, Heartbeat
from instep.data.loader import Loader, Read, Skipped, Slice
from instep.data.order import Position, key, position, steps_in_epoch
from instep.data.reading.threads import cpu_clock
from instep.data.samples import last_read
from instep.data.samples.contents import Record
from instep.errors import PeerError, SpecError
from instep.recipe.build import Recipe, build, set_generators
from instep.recipe.forward import Forward
from instep.recipe.rehearsal import called_backward, try_validation
from instep.spec import JobSpec
from instep.state.intact import discard_after
from instep.state.retention import best_rule
from instep.sync.base import make_strategy
from instep.system.addresses import address_towards
from instep.worker import knowing
from instep.worker.early_reads import EarlyReads
from instep.worker.evaluate import evaluate
from instep.worker.loader_watch import LoaderWatch
from instep.worker.member import Member
from instep.worker.observed import Observed, make_observers
from instep.worker.passes import OF_PASS, Pass, Share, parts_of, plan, share_of
from instep.worker.replica import Agreement, Replica, Weighed, check_lengths, make_comm
from instep.worker.sameness import (
    ANOTHER_SAW,
    LEAST,
    NOTHING_TO_TRY,
    Spot,
    Trial,
    mean_of,
    try_out,
)
from instep.worker.saving import Saver
from instep.worker.skipping import Teller
from instep.worker.standing import Committed, Standing
from instep.worker.stopping import Stopping, check_rules
from instep.worker.update import Update

_SPOTS = 32
"""Places in an epoch at which it may be tried whether cutting a batch changes the result."""


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


class Training:
    """What one worker needs to train, built and checked.

    Args:
        member: this worker's connection to the run.
        recipe: what to train.
        device: where.

    Raises:
        InstepError: something in the job or the recipe cannot be.
    """

    def __init__(self, member: Member, recipe: Recipe, device: torch.device) -> None:
        self.member, self.job, self.recipe, self.device = member, member.job, recipe, device
        self.phase, self.step = "building", 0
        self._loader_watch, self._clock = LoaderWatch(), cpu_clock()
        early = EarlyReads(self._loader_watch)
        member.at = lambda: early.heartbeat(self.phase, self._clock())
        self._done = 0  # steps that this process has committed
        check_device(self.job, device)
        check_rules(self.job.stop, recipe)
        measured = ("loss", *recipe.metrics) if recipe.validate is not None else ()
        self._best = best_rule(self.job.checkpoint, measured)
        self.samples = len(recipe.train)
        self.last_step = self.job.train.length(self.samples)
        fresh = member.checkpoint is None  # else it has what the model is by now
        built = build(recipe, self.job.seed, device, self.last_step, self.job.start, load=fresh)
        self._built = built
        self._loader = self._make_loader("train")  # forks before groups exist
        self._validation = self._make_loader("validate") if recipe.validate is not None else None
        self._loaders = [self._loader, *([self._validation] if self._validation else [])]
        for loader in self._loaders:
            loader.begin()
        self._record: Record | None = None
        """Takes the contents of samples as they are handed to a step, for the audit."""
        if self.job.check.content != "off" and member.run.is_dir():
            self._record = Record(member.run / f"contents-{member.number}.bin")
        self._unlike: int | None = None
        """A sample that does not repeat, as worker 0 found."""
        if not member.goes_on and member.number == 0:
            self._unlike = knowing.check_datasets(member, self._loader, self._validation)
        self._forward = Forward(recipe, built.model, device, self.job.train.precision)
        self._update = Update(
            built.optimizer,
            built.scheduler,
            built.parameters,
            seed=self.job.seed,
            max_grad_norm=self.job.train.max_grad_norm,
            measure=self.job.stop.by_norm,
            scaler=torch.amp.GradScaler("cuda", enabled=self.job.train.precision == "float16"),
        )
        self.sized: Callable[[int], None] = lambda workers: None
        """Told how many workers each generation has, before its first step."""
        self.rule = "steps" if self.job.train.steps else "epochs"
        self._replica: Replica | None = None
        self._stopping: Stopping | None = None
        self._saver: Saver | None = None
        self._warned: set[str] = set()
        self._teller = Teller(member)
        self._comm: Comm | None = None  # of a group that forms, or has
        self._regroups = False
        self._standing = Standing(member, built.model, self._update)
        self._observers = make_observers(
            Observed(
                member=member,
                model=built.model,
                update=self._update,
                standing=self._standing,
                run_pass=self._repeat,
                set_aside=self._set_aside,
                drop_after=self._drop_after,
            )
        )

    def _make_loader(self, name: str) -> Loader:
        recipe, job, train = self.recipe, self.job, name == "train"
        given = recipe.given[name]
        loaders = job.data.loaders
        if loaders == "auto" and given.loaders is not None:
            loaders = given.loaders
        return Loader(
            given.dataset,
            seed=job.seed,
            shuffle=train,
            collate=recipe.collate or given.collate,
            augment=recipe.augment if train else None,
            processes=loaders,
            unreadable=job.data.unreadable,
            name="training" if train else "validation",
            marks=self.member.marks,
            worker_init=given.worker_init,
            info_dataset=given.info_dataset,
            contents=job.check.content if train else "off",
            say=lambda text: self.member.emit(
                "warning", text=f"worker {self.member.number}: {text}"
            ),
        )

    def join(self) -> None:
        """Form the group with the other workers, and get ready for the first step.

        Raises:
            InstepError: the workers cannot train together.
        """
        began = time.time()
        self.member.recovers &= self.device.type == "cpu"  # NCCL waits long for who is gone
        self.member.interrupt, self.member.hold = self._interrupt, self._hold
        if not self.member.goes_on:  # else the others tell
            self._standing.trial = self._try()
            if self._validation is not None and self.member.number == 0:
                samples = min(self._validation_batch, self._validation_samples)
                try_validation(self._forward, self._validation, samples)
        self.member.at = self._heartbeat
        self._regroup()
        self.member.phases["group"] = time.time() - began
        self._announce()

    def _regroup(self) -> None:
        """Be a member of the next generation that holds together until it has formed."""
        self.phase = "joining"
        while True:
            self.member.wait_for_group()
            try:
                self._form()
                return
            except PeerError as error:
                if not self.member.recovers:
                    raise
                self._leave(error)

    def _heartbeat(self) -> Heartbeat:
        """What this worker is at; asked for by another thread."""
        replica = self._replica
        taken = replica.gradients.count if replica is not None else 0
        done = self._forward.batches + taken
        if pids := [pid for loader in self._loaders for pid in loader.pids]:
            waits = self.phase in ("loading", "validation")
            at, known = (self.step, self.phase, done), self._done > 0
            self._loader_watch.turn(time.monotonic(), pids, at=at, waits=waits, known=known)
        return Heartbeat(
            step=self.step,
            steps=self._done,
            phase=self.phase,
            progress=done + self._loader_watch.ended,
            cpu_s=self._clock() + sum(loader.cpu_s for loader in self._loaders),
        )

    def _waits(self) -> None:
        """From here on this worker can only wait for others."""
        self.phase = "exchange"

    def _interrupt(self) -> None:
        """An exchange under way, or a group that forms, will not end by itself; called by
        another thread."""
        comm = self._comm
        if comm is not None:
            comm.interrupt()

    def _hold(self) -> None:
        """The others may go on without this worker; called by another thread."""
        if self._replica is not None:
            self._replica.hold()

    def _leave(self, error: PeerError | None = None) -> None:
        """Leave the group: keep what was committed, undo the rest, tell the master.

        Args:
            error: why it came apart; None where its members change.
        """
        self.phase = "leaving"
        if error is not None:
            with suppress(OSError):  # to the log, and a full disk ends nothing
                print(f"instep: the group came apart: {error}", file=sys.stderr, flush=True)
        if self._replica is not None:
            self._standing.leave(self._replica)
        self._replica = self._comm = None
        self._regroups = False
        went_back = [observer.go_back() for observer in self._observers.values()]
        if any(went_back) and self._stopping is not None:
            self._stopping.go_back(self._standing.carried.step)
        self.step = self._standing.carried.step
        self.member.broken(error)

    def _form(self) -> None:
        """Form the group, agree on where training stands, and be ready for the next step.

        Raises:
            PeerError: a member went away meanwhile.
        """
        member, built, standing = self.member, self._built, self._standing
        for loader in self._loaders:
            loader.mark(member.marks)
        comm = make_comm(member, self.device, address_towards(member.master_host))
        self._comm = comm
        try:
            if member.superseded:  # told before there was anything to interrupt
                raise PeerError("the members changed while the group was forming.")
            check_lengths(comm, self.device, train=self.samples, validate=self._validation_samples)
            given = standing.begin(comm)
            self._agree_on_trial(comm)
            strategy = make_strategy(self.job.sync.name, self.job.sync.options)
            strategy.load_state(standing.carried.strategy)
            self._replica = Replica(
                member,
                built.model,
                built.parameters,
                strategy,
                comm,
                compare=not given,
                by_speed=self.job.train.deal == "speed",
                observers=self._observers,
            )
        except PeerError:
            comm.close()
            raise
        self.step = standing.carried.step
        last_read.set_step(self.step)
        self.sized(comm.size)
        standing.formed()
        if self._stopping is None:
            self._stopping = Stopping(member, comm, self.device)
        self._stopping.regroup(comm)
        if comm.rank != 0 and self._saver is not None:
            self._saver.hand_over()
            self._saver = None
        elif comm.rank == 0 and self._saver is None:
            self._saver = Saver(member, built.model, self._update, self._best)
        anew = member.form is not None and member.form.checkpoint is not None
        for observer in self._observers.values():
            observer.formed(strategy.state(), anew=anew)

    def _drop_after(self, step: int) -> None:
        if self._saver is not None:
            self._saver.drop_after(step)

    def _set_aside(self, step: int) -> None:
        """No checkpoint of a later step is taken up."""
        if self._saver is not None:
            self._saver.drop_after(step)
        else:
            discard_after(self.member.run / "checkpoints", step)

    @property
    def _validation_samples(self) -> int:
        return len(self.recipe.validate) if self.recipe.validate is not None else 0

    @property
    def replica(self) -> Replica:
        """This worker's copy of the model; there once the group has formed."""
        assert self._replica is not None, "join() comes first"
        return self._replica

    @property
    def stopping(self) -> Stopping:
        """The rules of `[stop]`; there once the group has formed."""
        assert self._stopping is not None, "join() comes first"
        return self._stopping

    @property
    def in_flight(self) -> int:
        """The step that is being computed; 0 before the first."""
        return self.step

    @property
    def doing(self) -> str:
        """What this worker is at, as precisely as it is known."""
        if self.phase == "forward":
            return self._forward.phase
        inner = self.phase in ("validation", "trying a batch")
        return f"{self.phase}: {self._forward.phase}" if inner else self.phase

    def _try(self) -> Trial:
        """Whether cutting a global batch into micro-batches changes the result."""
        train, self.phase = self.job.train, "trying a batch"
        slices = self._spots()
        seed = key(self.job.seed, OF_PASS, 0)
        if not slices:
            return NOTHING_TO_TRY._replace(derived=self._mean_of(seed))
        reads = self._loader.read(part for spot in slices for part in spot)
        spots = (spot for parts in slices if (spot := self._spot(reads, len(parts) - 1)))
        with closing(reads):
            trial = try_out(self._forward, spots, whole=train.global_batch, seed=seed)
        if train.merge == "always":
            return trial.merged_always()
        if train.merge == "never":
            return trial._replace(merge=False, reason="train.merge = 'never'")
        if train.determinism == "bits":
            reason = "determinism = 'bits' computes each micro-batch apart"
            return trial._replace(merge=False, reason=reason)
        return trial

    def _mean_of(self, seed: int) -> str:
        """What the loss of one micro-batch in each step is a mean of; a validation has several."""
        if self.recipe.compute_loss is None or self.recipe.weight is not None:
            return ""
        steps = min(LEAST, steps_in_epoch(self.samples, self.job.train.global_batch))
        reads = self._loader.read(part for n in range(steps) for part in self._micro_batches(1 + n))
        with closing(reads):
            return mean_of(self._forward, (each.batch for each in reads if each.size), seed=seed)

    def _spot(self, reads: Iterator[Read], parts: int) -> Spot | None:
        """The next of what is read; None where all samples of a part of it cannot be read."""
        *apart, whole = itertools.islice(reads, parts + 1)
        if not all(read.size for read in (*apart, whole)):
            return None
        return Spot(tuple(r.batch for r in apart), whole.batch, tuple(r.size for r in apart))

    def _spots(self) -> list[tuple[Slice, ...]]:
        """Neighbouring micro-batches, and all as one, from all over an epoch.

        Pairs, of which every other is uneven: a weight that forgets how many samples there are,
        such as the `len` of a tuple, is right wherever micro-batches are of one size. And where
        more are tried than of a large model, those of a whole step: what compares samples may
        do so only where there are many.
        """
        steps = steps_in_epoch(self.samples, self.job.train.global_batch)
        spots: dict[Slice, tuple[Slice, ...]] = {}
        for number in range(_SPOTS):
            parts = self._micro_batches(1 + number * steps // _SPOTS)
            if len(parts) > 1:  # another pair of each step, as there may be but one
                place = 2 * number % (len(parts) - 1)
                first, second, *more = parts[place : place + 3]
                if number % 2 and second.stop - second.first > 2:  # layers may refuse one sample
                    second = second._replace(stop=second.stop - 1)
                elif number % 2 and more:
                    second = second._replace(stop=more[0].stop)
                spots[first] = first, second, first._replace(stop=second.stop)
        few = list(spots.values())
        if len(few) > LEAST:
            every = self._micro_batches(1)
            few.insert(LEAST, (*every, every[0]._replace(stop=every[-1].stop)))
        return few

    def _micro_batches(self, step: int) -> list[Slice]:
        """Those of a step, in its order."""
        where = position(step, self.samples, self.job.train.global_batch)
        every = share_of(where, parts_of(where, self.job.train), 1, 0, merge=False)
        return [part.samples for part in every.passes]

    def _agree_on_trial(self, comm: Comm) -> None:
        """Merge only where every member's trial says so, and say `yes` only where each does.

        A dataset that does not repeat is `no` for all of them, whatever the trials saw.
        """
        trial = self._for_what_is_lost(self._standing.trial or self._try())
        self._forward.derive(trial.derived)
        unlike = 0 if self._unlike is None else 1 + self._unlike
        found = torch.tensor([trial.merge, trial.same, unlike], dtype=torch.float64)
        found = found.to(self.device)
        comm.all_reduce(found).wait()
        if trial.merge and float(found[0]) < comm.size:
            trial = trial._replace(merge=False, reason="another worker's trial showed a difference")
        if trial.same and float(found[1]) < comm.size:
            trial = trial._replace(verdict=ANOTHER_SAW)
        if unlike := int(found[2]):
            trial = trial._replace(verdict=knowing.not_as_read_once(unlike - 1))
        self._standing.trial = trial
        if self.job.check.strict and not trial.same:
            raise SpecError(
                f"check.strict = true refuses to train. Same as one machine: {trial.verdict}."
            )

    def _for_what_is_lost(self, trial: Trial) -> Trial:
        """`no`, whatever the trial says, where a sampler that is not used decides what is trained.

        One machine would have used it; so the remedy of the trial's own `no` would not help.
        """
        every = self.recipe.given["train"].unused(
            "Recipe.train", shuffled=True, batch=self.job.train.global_batch
        )
        decisive = "; ".join(f"{text}. {remedy}" for text, remedy in every if remedy)
        return trial._replace(verdict=f"no: {decisive}") if decisive else trial

    @property
    def _trial(self) -> Trial:
        assert self._standing.trial is not None, "join() comes first"
        return self._standing.trial

    def _announce(self) -> None:
        member, loader = self.member, self._loader
        gpus = torch.cuda.device_count()
        if gpus and self.device.type == "cpu" and self.job.train.device == "auto":
            self._warn(
                f"{self.job.workers} workers compute on the CPU, since this machine has "
                f"{gpus} GPUs; --workers {gpus} would use them"
            )
        for name, given in self.recipe.given.items():
            batch = self.job.train.global_batch
            for lost in given.unused(f"Recipe.{name}", shuffled=name == "train", batch=batch):
                self._warn(lost.text)
        if pids := [*loader.pids, *(self._validation.pids if self._validation else [])]:
            member.emit("loaders_started", worker=member.number, pids=pids)
        parameters = sum(p.numel() for p in self._built.parameters)
        if self._built.loaded is not None and self.replica.comm.rank == 0:
            member.emit("model_loaded", **self._built.loaded.fields())
        trial = self._trial
        member.emit("passes_chosen", worker=member.number, merged=trial.merge, reason=trial.reason)
        if self.replica.comm.rank == 0 and not member.goes_on:
            member.emit("same_as_one_machine", verdict=trial.verdict)
        member.emit(
            "worker_ready",
            worker=member.number,
            device=str(self.device),
            threads=torch.get_num_threads(),
            parameters=parameters,
            samples=self.samples,
            validation_samples=self._validation_samples,
            last_step=self.last_step,
            loader=f"{loader.mode}: {loader.why}",
            phases=member.phases,
        )

    # ---- the loop

    def steps(self) -> Iterator[Step]:
        """Train; yields after each commit. Stops at the end, or where all were told to.

        Where a member is lost and will be replaced, goes on with the others from
        the highest step that one of them has committed. Where the members change, so
        does the group, between two steps.

        Raises:
            Released: the run goes on without this worker.
        """
        while True:
            apart: PeerError | None = None
            try:
                yield from self._steps()
                if not self._regroups:
                    return
            except PeerError as error:
                if not self.member.recovers:
                    raise
                apart = error
            self._leave(apart)
            self._regroup()

    def _steps(self) -> Iterator[Step]:
        """The steps of one generation."""
        self._built.model.train()
        standing = self._standing
        if standing.last is not None and (standing.settled < self.step or standing.last.ends):
            step, ends = self._settle(standing.last)  # at the end too: whoever saved may be gone
            yield step
            if ends:
                return
        if standing.ended:
            self._why(told=True)
            return
        while (yield from self._steps_of_a_deal()):
            pass

    def _steps_of_a_deal(self) -> Generator[Step, None, bool]:
        """The steps until the end, or until work is dealt otherwise; whether that is so."""
        first, dealt = self.step + 1, self.replica.dealing.speeds
        parts = (part.samples for _, share in self._plan(first) for part in share.passes)
        loads = self._loader.read(parts, self._record)
        try:
            for where, share in self._plan(first):
                self.step += 1
                last_read.set_step(self.step)
                done = self._standing.commit(self._one_step(where, share, loads), where)
                self._done += 1
                step, ends = self._settle(done)
                yield step
                self._regroups &= not ends
                if ends or self._regroups:
                    break
                if self.replica.dealing.speeds != dealt:
                    return True
        finally:
            loads.close()
        return False

    def _settle(self, done: Committed) -> tuple[Step, bool]:
        """What follows a commit: judge it, validate, save. Done again if a member is lost in it.

        Returns:
            The step, and whether this start of the run ends with it.
        """
        self.member.check_lease()
        where = position(done.step, self.samples, self.job.train.global_batch)
        self._tell_epoch(where)
        self.stopping.after_commit(done.step, done.loss, done.norm, last=done.ends)
        metrics = self._validate(where) if done.ends or self._is_time(where) else None
        if metrics is not None and not done.ends:
            told = self.stopping.after_validation(done.step, metrics)
            self._standing.last = done = done._replace(told=told, ends=told)
        carried = self._standing.carried
        self.phase = "saving"
        if self._saver is not None and not self.stopping.spoilt:
            self._saver.after_step(
                done.step,
                where,
                self.replica,
                last=done.ends,
                epoch_so_far=(carried.epoch_loss, carried.epoch_samples),
                metrics=metrics,
            )
        if done.ends:
            self._why(done.told, self.stopping.not_finite(done.loss, done.norm))
        self._standing.settled = done.step
        return Step(done.step, where.epoch, done.loss, metrics), done.ends

    def _tell_epoch(self, where: Position) -> None:
        if where.stop == self.samples and self.replica.comm.rank == 0:
            self.member.emit(
                "epoch_finished",
                epoch=where.epoch,
                step=self.step,
                loss=self._standing.carried.epoch_loss / self._standing.carried.epoch_samples,
                samples=self._standing.carried.epoch_samples,
            )

    def _why(self, told: bool, not_finite: str = "") -> None:
        if self.step == self.last_step:
            return
        if not_finite:
            self.rule = NOT_FINITE
            self.stopping.tell_of(not_finite, self.step)
            return
        self.rule = TOLD if told else "stop_after_steps"

    def _plan(self, first: int) -> Iterator[tuple[Position, Share]]:
        planned = plan(
            self.job,
            self.samples,
            first,
            self.last_step,
            self.replica.comm,
            merge=self._trial.merge,
            speeds=self.replica.dealing.speeds,
        )
        for observer in self._observers.values():
            planned = observer.plan(planned, first, self.replica.dealing.speeds)
        return planned

    def _one_step(self, where: Position, share: Share, loads: Iterator[Read]) -> Committed:
        """From samples to a commit."""
        agreed = self._agree(where, share, loads)
        if agreed is None:  # the gradients did not fit: the same passes, on another lattice
            again = self._loader.read((part.samples for part in share.passes), self._record)
            agreed = self._agree(where, share, again)
            assert agreed is not None, "a strategy asked for a third time"
        self._regroups = agreed.regroups
        self.phase, samples = "update", share.stop - share.first
        norm = self.replica.advance(self._update, self.step, where, samples, agreed.loss)
        spoilt = bool(self.stopping.not_finite(agreed.loss, norm))
        if not (math.isfinite(agreed.loss) or spoilt):
            self._warn_of_loss(agreed.loss)
        ends = (
            agreed.stop or spoilt or self.step in (self.last_step, self.job.train.stop_after_steps)
        )
        return Committed(self.step, agreed.loss, norm, agreed.stop, ends, agreed.skipped)

    def _agree(self, where: Position, share: Share, loads: Iterator[Read]) -> Agreement | None:
        """Run this worker's passes, and agree on what came of them."""
        replica, clock = self.replica, self.replica.clock
        batch_size = where.stop - where.first
        losses: dict[int, Weighed] = {}
        skipped: list[Skipped] = []
        replica.begin_step(self.step, where)
        for number, part in enumerate(share.passes):
            if self.member.superseded:
                raise PeerError("the members have changed in the middle of a step.")
            since = time.perf_counter()
            self.phase = "loading"
            read = next(loads)
            since = clock.lap(since, "load")
            skipped += [] if part.repeats else read.skipped
            if not read.size:
                continue
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number))
            self.phase, taken = "forward", replica.gradients.count
            found = self._forward.loss(read.batch, read.size)
            if replica.gradients.count != taken:  # the trial may see other samples, or none
                raise called_backward()
            if found is None:  # nothing in it counts: as if it had not been
                replica.skip_pass(part)
                continue
            factor = 0.0 if part.repeats else found.factor
            if not part.repeats:
                total = float(found.loss.detach()) * factor
                losses[part.number] = Weighed(total, found.weight)
            since = clock.lap(since, "forward")
            self.phase = "backward"
            last = number == len(share.passes) - 1
            replica.begin_pass(part, factor / batch_size, last=last)
            self._update.scaler.scale(found.loss).backward()
            replica.end_pass(part, 0.0 if part.repeats else read.size / batch_size)
            clock.lap(since, "backward")
        self._teller.tell(skipped, dataset="training", step=self.step, epoch=where.epoch)
        self._waits()
        told = self.stopping.told(self.step)
        return replica.agree(losses, stop=told, skipped=len(skipped), samples=batch_size)

    def _repeat(self, part: Pass, factor: float) -> None:
        """One more pass of the present step, its loss times a factor, of which nothing stays."""
        with self.replica.aside():
            (read,) = self._loader.read([part.samples])
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number))
            found = self._forward.loss(read.batch, read.size)
            assert found is not None, "a pass in which nothing counts has no gradient to repeat"
            self._update.scaler.scale(found.loss * factor).backward()

    def _warn_of_loss(self, loss: float) -> None:
        if "loss" not in self._warned:
            self._warned.add("loss")
            self._warn(f"the loss at step {self.step} is {loss}; training goes on")

    def _warn(self, text: str) -> None:
        """Say it in the log, once, by one worker."""
        if self.replica.comm.rank == 0 and text not in self._warned:
            self._warned.add(text)
            self.member.emit("warning", text=f"{text}.")

    def _is_time(self, where: Position) -> bool:
        every = self.job.train.validate_every
        return self.step % every == 0 if every else where.stop == self.samples

    @property
    def _validation_batch(self) -> int:
        """Samples of one forward pass of the validation."""
        train = self.job.train
        parts = train.micro_batches if train.merge == "never" else 1
        return -(-train.global_batch // parts)

    def _validate(self, where: Position) -> dict[str, float] | None:
        if self._validation is None:
            return None
        self.phase = "validation"
        begin, count = time.perf_counter(), len(self.recipe.validate)
        batch = self._validation_batch
        speeds, comm = self.replica.dealing.speeds, self.replica.comm
        found = evaluate(self._forward, self._validation, count, batch, comm, speeds, self._waits)
        left_out = found.skipped
        self._teller.tell(left_out, dataset="validation", step=self.step, epoch=where.epoch)
        if self.replica.comm.rank == 0:
            self.member.emit(
                "validated",
                step=self.step,
                epoch=where.epoch,
                metrics=found.metrics,
                samples=found.samples,
                skipped=count - found.samples,
                seconds=time.perf_counter() - begin,
                scheduled=self._is_time(where),
            )
        return found.metrics

    # ---- the end

    def finish(self) -> bool:
        """Save the model and leave, together with the others.

        Returns:
            False where a member was lost before all had ended: train on, then finish again.
        """
        self.phase = "saving"
        if self._saver is not None and not self.member.fenced:
            self._saver.finish(self.step)
        if self.member.fenced or not self.member.done(self.step, self.rule, finite=self._finite):
            self._leave()
            self._regroup()
            return False
        self.close()
        return True

    @property
    def _finite(self) -> bool:
        last = self._standing.last
        return self.rule != NOT_FINITE and (last is None or math.isfinite(last.loss))

    def released(self) -> None:
        """The run goes on without this worker: what it has begun to save, it saves."""
        if self._saver is not None:
            self._saver.hand_over()
        self.close()

    def close(self) -> None:
        """Let go of loaders and group."""
        self._loader.close()
        if self._record is not None:
            self._record.close()
        if self._validation is not None:
            self._validation.close()
        if self._replica is not None:
            self._replica.close()


def choose_device(job: JobSpec, local_rank: int) -> torch.device:
    """A GPU of its own for each worker where there are enough, else the CPU.

    Raises:
        SpecError: the job wants CUDA and there is not a GPU for this worker.
    """
    wanted, count = job.train.device, torch.cuda.device_count()
    if wanted == "cuda" and local_rank >= count:
        raise SpecError(
            f"train.device = 'cuda' with {job.workers} workers, but this machine has {count} GPUs. "
            "Use fewer workers, or train.device = 'cpu'."
            if count
            else f"train.device = 'cuda', but torch {torch.__version__} finds no GPU on this "
            "machine. Use train.device = 'cpu'; or put a driver, and a torch that is built for "
            "CUDA, in place."
        )
    if wanted == "cuda" or (wanted == "auto" and count >= job.workers):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def check_device(job: JobSpec, device: torch.device) -> None:
    """Refuse a precision that the device does not have."""
    if job.train.precision == "float16" and device.type != "cuda":
        raise SpecError(
            "train.precision = 'float16' needs CUDA, and this worker computes on the CPU. "
            "Use train.precision = 'bfloat16' here."
        )
