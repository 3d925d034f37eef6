"""Training a recipe in one worker: build it, try it, run its passes and validations.

The loop around them is in `loop.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from instep.comm.base import Comm
from instep.comm.protocol.messages import COMPILING, Heartbeat
from instep.data.lengths import ByLength
from instep.data.loader import Read
from instep.data.order import Position
from instep.data.participants import OwnRounds
from instep.data.parts.order import PartsOrder
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.streams.shares import AnyTurns
from instep.data.reading.threads import cpu_clock
from instep.data.samples.contents import Record
from instep.data.windowed import Windowed
from instep.engine.alike import check_division, check_samples, check_shards
from instep.engine.assignment import Lockstep, Near
from instep.engine.member import Member
from instep.engine.passes import Share
from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.served.tables import ServedTables, refuse_sparse
from instep.engine.state.average import Average
from instep.engine.state.committed import Commit
from instep.engine.trial_result import Trial
from instep.engine.turns import TurnState, make_turns
from instep.engine.update import Update
from instep.errors import InstepError, PeerError, SpecError, raise_first
from instep.parallel.compiled import compiling
from instep.parallel.global_batch.batch_norm import make_global
from instep.parallel.host_state import keep_on_host
from instep.recipe.build import build_model, build_optimizer
from instep.recipe.forward import Forward
from instep.recipe.large import measured
from instep.recipe.recipe import Recipe
from instep.state.intact import discard_after
from instep.state.retention import Best, best_rule
from instep.sync import LEASED, SERVERS
from instep.sync.servers.server_sync import ServerSync
from instep.system.malloc import return_unused_memory
from instep.words import listed
from instep.worker.loop.after_commit import CALLBACKS, Step
from instep.worker.loop.loop import Loop
from instep.worker.loop.observed import Observed, make_observers
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute, Results
from instep.worker.passes.late_trial import TRYING, LateTrial
from instep.worker.passes.on_mesh import MeshPass, OnMesh
from instep.worker.passes.ordinary import Ordinary
from instep.worker.passes.repeat import RepeatPass
from instep.worker.passes.shared_steps import MembersChanged, SharedSteps
from instep.worker.passes.unfreezing import Frozen
from instep.worker.passes.whole_batch import WholeBatch
from instep.worker.passes.works import Works
from instep.worker.reading import data_split, dataset_check
from instep.worker.reading.class_order import said_of_classes
from instep.worker.reading.early_reads import EarlyReads
from instep.worker.reading.loader_watch import LoaderWatch
from instep.worker.reading.planned_data import plan_data, say_balance, say_chosen, say_lengths
from instep.worker.reading.read_once import ReadOnce
from instep.worker.reading.streamed import check_stream, stream_of_worker
from instep.worker.replica.fellows import Fellows
from instep.worker.replica.replica import Replica
from instep.worker.rounds import own_data, round_checks
from instep.worker.rounds.probe import Probe
from instep.worker.rounds.round_update import RoundUpdate
from instep.worker.rounds.rounds import Rounds
from instep.worker.training.callback_writes import CallbackWrites
from instep.worker.training.entry import Entry, take_host_copy
from instep.worker.training.inputs import Inputs
from instep.worker.training.private import private_run
from instep.worker.training.refusals import measured_by, refusals
from instep.worker.training.trials import Trials, agreed, decided_by_job
from instep.worker.training.validation import Validation

if TYPE_CHECKING:
    from instep.worker.reading.parted_data import PartedData


class Training(Loop):
    """One worker's training of a recipe, built and checked.

    Args:
        member: this worker's membership in the run.
        recipe: what to train.
        device: where.

    Raises:
        InstepError: job or recipe cannot be trained.
    """

    compute: Compute
    refuse: Callable[[Iterable[InstepError]], None] = staticmethod(raise_first)
    """Told the reasons why job and recipe do not go together."""

    def __init__(self, member: Member, recipe: Recipe, device: torch.device) -> None:
        self.member, self.job, self.device = member, member.job, device
        self._parted: PartedData | None = None
        self._lying: Near | None = None
        recipe = stream_of_worker(member, recipe)
        if self.job.data.parts and not recipe.given["train"].streams:
            from instep.worker.reading.parted_data import PartedData  # which needs pyarrow

            self._parted = PartedData(member, recipe.train, recipe.validate)
        split = data_split.split_data(self.job, recipe)
        self.recipe = recipe = split.recipe
        self.activity = Activity()
        self._loader_watch, self._clock = LoaderWatch(), cpu_clock()
        early = EarlyReads(self._loader_watch)
        member.at = lambda: early.heartbeat(self._present, self._clock())
        self.refuse(refusals(self.job, recipe, device))
        self._private = private_run(member, recipe)
        planned = self._private.planned() if self._private else plan_data(self.job, recipe)
        batches = planned.batches
        samples, last_step = batches.samples, batches.length(self.job)
        if self._private:
            last_step = self._private.last_step(last_step)
        fresh = member.checkpoint is None  # else the checkpoint has the parameters
        averages = self.job.sync.rounds is not None
        embeds = recipe.batch_loss is not None
        model, begun = build_model(
            recipe,
            self.job.seed,
            device,
            self.job.start,
            self.job.lora,
            load=fresh,
            building=measured(self.job, member.scratch) if self.job.mesh.ranks > 1 else None,
            rows_in=member.scratch if self.job.sync.name in SERVERS - LEASED else None,
        )
        self._reads = make_global(model) if self.job.train.batch_norm == "global" else None
        self._forward = Forward(recipe, model, device, self.job.train.precision)
        self._own_data = own_data.divide(self.job, recipe)
        self._inputs = inputs = Inputs.begun(member, self._forward, self._own_data, planned)
        loader, validation = inputs.train, inputs.validate
        self.batches, self.samples = batches, samples
        updates = round_checks.updates(self.job, last_step)
        self._trials = Trials(inputs, updates, begun, self.activity)
        batch = self.job.train.global_batch
        if member.number == 0 and samples < batch and not self._own_data:
            text = f"train.global_batch = {batch:,}, and the dataset has {samples:,} samples: "
            member.emit("warning", text=f"{text}a step takes all of them, and is an epoch.")
        trial, replica = None, None
        if self.job.mesh.ranks > 1:
            entry = Entry(inputs, self._trials, self.activity, self._reads, device)
            trial, replica = entry.enter(model, begun)
        self._replica: Replica | None = replica
        self._tidy = False
        if self.job.sync.name in LEASED:
            refuse_sparse(model, self.job)
        tables = None
        if self.job.sync.name in SERVERS - LEASED:
            tables = ServedTables(model, self.job, batch_loss=embeds)
        built = build_optimizer(recipe, model, updates, self.job.start, begun)
        if tables:
            built = tables.made(built)
        self._built = built
        if self.job.mesh.offload == "optimizer":
            keep_on_host(built.optimizer)
        scaler = torch.amp.GradScaler("cuda", enabled=self.job.train.precision == "float16")
        turns = make_turns(built, self.job, scaler, replica)
        make_update = partial(RoundUpdate, job=self.job) if averages else Update
        if self.job.sync.name in SERVERS:
            make_update = LeasedUpdate if self.job.sync.name in LEASED else ServedUpdate
        update = make_update(
            built.optimizer,
            built.scheduler,
            built.parameters,
            seed=self.job.seed,
            max_grad_norm=self.job.train.max_grad_norm,
            measure=self.job.measures_norm,
            scaler=scaler,
        )
        if self._private:
            strategy = self._private.strategy(model, built.parameters)
            turns = [TurnState("", built.parameters, update, strategy)]
        super().__init__(
            member,
            model,
            built.parameters,
            update,
            loader,
            batches,
            last_step,
            int(embeds),
            turns,
            self._replica,
            recipe.callbacks,
            take=update.keep if isinstance(update, RoundUpdate) else None,
            activity=self.activity,
        )
        if self._replica is not None:
            self.fellows = Fellows(self._replica, member, self.engine, self._interrupt)
        if self._parted is not None:
            self.after.tell_epochs(self._tell_given)
        self.engine.state.trial = trial
        if self.job.train.ema is not None:
            self.engine.state.average = Average(model, self.job.train.ema)
        if tables and isinstance(self.engine.turn.strategy, ServerSync):
            self.engine.tables, self.engine.turn.strategy.tables = tables, tables.tables
            tables.tables.waiting = self.activity.waiting
        apart = own_data.validated_apart(self.job, self._own_data)
        if isinstance(update, RoundUpdate) and self._replica is None and not self.job.sync.sealed:
            probe = Probe(self._forward, validation, apart or [inputs.validation_samples])
            update.probe = probe.predictions
        self.compute = self._make_compute(update)
        watched = member, self._forward, loader, self.engine.state, self.activity
        self._late = LateTrial(*watched, last=self.last_step, alone=replica is None)
        self._unthawed = Frozen(model)
        if self._replica is not None:  # all that a state is given to is there
            take_host_copy(self.engine, self._replica)
        weighed = (*self._forward.losses, recipe.weight)
        data = (recipe.train, recipe.collate, recipe.augment)
        steered = [turn.update for turn in self.engine.turns]
        writes = CallbackWrites(member, self.engine.state, model, weighed, data, steered)
        self.callbacks.watch(writes.during)
        self._validation = Validation(
            inputs,
            self.engine,
            self.activity,
            self.compute,
            self._skips,
            self._replica,
            apart,
        )
        hides = self._private is not None or self.job.sync.sealed > 0
        records = self.job.check.content != "off" and not hides
        if records and member.sees_run and member.run.is_dir():
            # contents of samples as steps use them, for the audit
            self._record = Record(member.run / f"contents-{member.number}.bin")
        self._unrepeatable: int | None = None
        """A training sample that was different when worker 0 read it again."""
        self._once = ReadOnce.of(member, loader, recipe.train)
        first = not member.others_have_state and member.number == 0
        if first:
            check_stream(member, recipe, loader)
        if first and not hides:
            data_split.check(split, member, loader, validation)
            self._unrepeatable = dataset_check.check_datasets(
                member, loader, validation, recipe.train
            )
            if member.checkpoint is None and (
                said := said_of_classes(self.job, recipe, loader.order)
            ):
                member.emit("warning", text=said)
            say_chosen(member, recipe)
            if planned.balanced:
                say_balance(member, planned)
            if planned.lengths:
                say_lengths(member, planned)
        if first and self._own_data is not None:
            own_data.check(self._own_data, member, recipe)
        self.sized: Callable[[int], None] = lambda workers: None
        """Called with the number of workers of each generation, before its first step."""
        self.engine.observers = make_observers(
            Observed(
                member=member,
                model=model,
                update=update,
                state=self.engine.state,
                run_pass=RepeatPass(self.engine, self._forward, loader, update),
                set_aside=self._set_aside,
                drop_after=self.after.drop_after,
            )
        )

    def _make_compute(self, update: Update) -> Compute:
        """How this worker runs its passes."""
        engine, forward, replica, reads = self.engine, self._forward, self._replica, self._reads
        given, activity, member = (self._loader, self.job, self.samples), self.activity, self.member
        if isinstance(update, RoundUpdate):
            shared = None
            if replica is not None:
                shared = SharedSteps(engine, forward, self._loader, update, *given[1:], replica)
            return Rounds(
                engine,
                forward,
                update,
                self.job,
                self.batches,
                left=lambda: member.superseded,
                activity=activity,
                shared=shared,
            )
        if replica is not None:
            passes = MeshPass(forward, replica, reads)
            return OnMesh(engine, passes, Works(*given), activity)
        if self._private is not None:
            return self._private.compute(engine, forward, activity)
        if reads is not None or self.recipe.batch_loss is not None:
            return WholeBatch(engine, forward, Works(*given), self.job, reads, activity)
        return Ordinary(engine, forward, self.job.seed, activity, lambda: member.superseded)

    def join(self) -> None:
        """Form the group with the other workers, and get ready for the first step.

        Raises:
            InstepError: the workers cannot train together.
        """
        self.member.together = self.device.type != "cpu"  # NCCL takes long to notice a lost process
        self.member.interrupt, self.member.hold = self._interrupt, self.engine.records.hold
        if not self.member.others_have_state and self._replica is None:
            self.engine.state.trial = self._try()  # else the others send the result
        began = time.time()
        self.member.at = self._heartbeat
        self._regroup()
        self.member.phases["group"] = time.time() - began
        self._report_ready()

    def _commit(self) -> Commit:
        done = super()._commit()
        if self._once is not None:
            self._once.committed(self.step)
        if self._replica is not None and not self._tidy:
            self._tidy = True
            return_unused_memory()  # what trials and checks have left
        return done

    def _form(self) -> None:
        for loader in self._inputs.loaders:
            loader.mark(self.member.marks)
        super()._form()

    @property
    def _present(self) -> str:
        return COMPILING if compiling() else self.activity.phase

    def _heartbeat(self) -> Heartbeat:
        done = self._forward.batches + self.engine.passes.taken
        if pids := self._inputs.pids:
            waits = self.activity.phase in ("loading", "validation")
            at, known = (self.step, self.activity.phase, done), self._done > 0
            self._loader_watch.turn(time.monotonic(), pids, at=at, waits=waits, known=known)
        self.callbacks.tell_if_long()
        # a callback may take as long as it likes, and so may what is read once
        free = (CALLBACKS, *(("loading", TRYING, "joining") if self._once is not None else ()))
        called_back = int(time.monotonic()) if self.activity.phase in free else 0
        return Heartbeat(
            step=self.step,
            steps=self._done,
            phase=self._present,
            progress=done + self._loader_watch.ended + called_back,
            cpu_s=self._clock() + sum(loader.cpu_s for loader in self._inputs.loaders),
        )

    def _before_steps(self, comm: Comm) -> None:
        if self._once is not None:
            self._once.committed(self.engine.state.progress.step)
            self._once.let_go()
        self._agree_on_trial(comm)
        if self._once is not None:
            self._once.let_go()
        if self._own_data is not None:
            check_division(comm, self.device, self._own_data.train.digest)
        if isinstance(self._loader.order, Windowed | PartsOrder | AnyTurns):
            check_shards(comm, self.device, self._loader.order.digest)
        if isinstance(self._loader.order, ByLength):
            check_samples(comm, self.device, self._loader.order.digest)
        self.compute.begin(comm)
        if self._parted is not None:
            order = self._own_rounds or self._loader.order
            assert isinstance(order, PartsOrder | OwnRounds), "the order of a set in parts"
            held = self._parted.meet(comm, order.lots, self.device)
            self._lying = Near(order, held)
            if comm.rank == 0:
                self.member.emit(
                    "parts_placed",
                    sizes=[int(samples.sum()) for _, samples in order.lots],
                    held={str(n): held[rank] for rank, n in enumerate(self._group.members)},
                )
        self.sized(comm.size)

    def _lengths(self) -> dict[str, int]:
        return {"train": self.samples, "validate": self._inputs.validation_samples}

    def _best(self) -> Best | None:
        return best_rule(self.job.checkpoint, measured_by(self.recipe))

    @property
    def _merge(self) -> bool:
        return self._trial.merge

    def _lockstep(self, comm: Comm) -> Lockstep:
        stream = self.recipe.train  # another part is read from its start, unless it has a state
        stays = isinstance(stream, AnyStream) and not stream.has_state
        by_speed = self.job.train.deal == "speed" and not stays
        return self._deal(comm, by_speed=by_speed, own=self._own_rounds, near=self._lying)

    @property
    def _own_rounds(self) -> OwnRounds | None:
        return self._own_data.rounds if self._own_data is not None else None

    def _tell_given(self, step: int) -> None:
        """At the end of an epoch: what others have got of the parts that lie here, and copies."""
        own = self.member.number
        samples, size = self._parted.given if self._parted is not None else (0, 0)
        self.member.emit("samples_given", worker=own, step=step, samples=samples, bytes=size)
        if self._parted is not None and self.job.data.copies > 1:
            shards, size = self._parted.copied
            self.member.emit("shards_copied", worker=own, step=step, shards=shards, bytes=size)

    def _set_aside(self, step: int) -> None:
        if not self.after.drop_after(step):
            discard_after(self.member.run / "checkpoints", step)

    @property
    def doing(self) -> str:
        """What this worker is at, as precisely as it is known."""
        if self.callbacks.present:
            return self.callbacks.present
        if self.activity.phase == "forward":
            return self._forward.phase
        within = {"validation": "validation", TRYING: "the trial of a batch"}
        if (outer := within.get(self.activity.phase)) is not None:
            return f"{outer} ({self._forward.phase})"
        return self.activity.phase

    def _try(self) -> Trial:
        if self._private is not None:
            return self._private.trial()
        if self._once is None:
            return self._trials.run(built=self._built)
        with self._once.trying():
            return self._trials.run(built=self._built)

    def _agree_on_trial(self, comm: Comm) -> None:
        """Agree on the verdict, and on whether micro-batches are merged.

        Raises:
            SpecError: the verdict is not `yes`, and `check.strict`.
        """
        replica = self._replica
        trial = decided_by_job(
            self.job,
            self.recipe,
            self.engine.state.trial or self._try(),
            draws_by_block=replica is not None and replica.draws_by_block,
        )
        self._forward.derive(trial.derived, trial.each)
        self._late.begin(trial)
        self.engine.state.trial = trial = agreed(comm, self.device, trial, self._unrepeatable)
        if replica is not None and comm.rank == 0 and not self.member.known:
            self.member.remember(trial.encoded())
        if self.job.check.strict and not trial.same:
            raise SpecError(
                f"check.strict = true refuses to train. Same as one machine: {trial.verdict}."
            )

    @property
    def _trial(self) -> Trial:
        assert self.engine.state.trial is not None, "join() comes first"
        return self.engine.state.trial

    def _report_ready(self) -> None:
        member = self.member
        gpus = torch.cuda.device_count()
        auto = self.job.train.device == "auto" and self.job.sync.name not in SERVERS
        if gpus and self.device.type == "cpu" and auto:
            self.announcer.warn(
                f"{self.job.workers} workers compute on the CPU, since this machine has "
                f"{gpus} GPUs; --workers {gpus} would use them"
            )
        for name, given in self.recipe.given.items():
            batch = self.job.train.global_batch
            shuffled = self.job.data.shuffled if name == "train" else None
            for lost in given.unused(
                f"Recipe.{name}",
                shuffled=shuffled,
                batch=batch,
                planned=name == "train",
                tokens=self.job.train.tokens_per_batch if name == "train" else None,
            ):
                self.announcer.warn(lost.text)
        if pids := self._inputs.pids:
            member.emit("loaders_started", worker=member.number, pids=pids)
        if self.engine.comm.rank == 0:
            if self._built.loaded is not None:
                member.emit("model_loaded", **self._built.loaded.fields())
            if self._built.adapted is not None and member.checkpoint is None:
                member.emit("lora_added", **self._built.adapted.fields())
                if unused := self._built.adapted.unused:
                    self.announcer.warn(
                        f"the trial did not call {listed(unused, 4)}: an adapter there has no "
                        "effect if the model uses the weight and not the layer"
                    )
        trial = self._trial
        member.emit("passes_chosen", worker=member.number, merged=trial.merge, reason=trial.reason)
        if self.engine.comm.rank == 0 and not member.others_have_state:
            member.emit("same_as_one_machine", verdict=trial.verdict)
        self._announce()

    def _announce(self) -> None:
        self.announcer.ready(
            self._loader, self.batches, self._inputs.validation_samples, self.last_step
        )

    # ---- the loop

    def steps(self) -> Iterator[Step]:
        """Train to the end, and save the model; yields after each commit. See `Loop.run`."""
        finished = False
        while not finished:  # a worker may be lost before all have ended
            yield from self.run()
            finished = self.finish()

    def _passes(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Step, None, Results]:
        yield from ()  # only own loops yield in the middle of a step
        if self._private is None:
            self._late.try_trained(where, share, self.step)
        if self.recipe.collates and self._private is None and self._once is None:
            loads = self._late.tried(where, loads, self.step)
        try:
            found = self.compute.run(where, share, loads, self.step)
            self._unthawed.check(self.step)
            return found
        except MembersChanged:
            raise
        except PeerError as error:
            self.fellows.broke(error)  # what is computed together cannot be left half done
            raise

    def _validate(self, where: Position) -> dict[str, float] | None:
        scheduled = self.after.is_time(self.step)
        return self._validation.run(where, self.step, scheduled=scheduled)

    def close(self) -> None:
        """Close loaders, door and group; a second call does nothing."""
        super().close()
        if self._parted is not None:
            self._parted.close()
        if self._inputs.validate is not None:
            self._inputs.validate.close()
        if self._replica is not None:
            self._replica.close()
