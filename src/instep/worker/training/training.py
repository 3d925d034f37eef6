"""Training a recipe in one worker: build it, try it, run its passes and validations.

The loop around them is in `loop.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext

import torch

from instep.comm.base import Comm
from instep.comm.protocol.messages import Heartbeat
from instep.data.loader import Read
from instep.data.order import Position
from instep.data.participants import OwnRounds
from instep.engine.assignment import Lockstep
from instep.engine.member import Member
from instep.engine.passes import Near, Share
from instep.engine.served.tables import ServedTables
from instep.engine.state.average import Average
from instep.engine.state.committed import Commit
from instep.engine.trial_result import Trial
from instep.engine.update import Update
from instep.errors import InstepError, PeerError, raise_first
from instep.parallel.global_batch.batch_norm import make_global
from instep.recipe.build import build_model
from instep.recipe.forward import Forward
from instep.recipe.large import measured
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import Begun
from instep.state.retention import Best, best_rule
from instep.sync.servers.server_sync import ServerSync
from instep.system.malloc import return_unused_memory
from instep.worker.loop.after_commit import Step
from instep.worker.loop.loop import Loop
from instep.worker.loop.observed import observers_of
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute, Results
from instep.worker.passes.late_trial import LateTrial
from instep.worker.passes.repeat import RepeatPass
from instep.worker.passes.shared_steps import MembersChanged
from instep.worker.passes.unfreezing import Frozen
from instep.worker.reading.planned_data import PlannedData, plan_data
from instep.worker.reading.read_once import ReadOnce
from instep.worker.replica.fellows import Fellows
from instep.worker.rounds import own_data, round_checks
from instep.worker.rounds.probe import Probe
from instep.worker.rounds.round_update import RoundUpdate
from instep.worker.training.callback_writes import writes_around
from instep.worker.training.computes import compute_for
from instep.worker.training.entry import Entry, take_host_copy
from instep.worker.training.heartbeats import Heartbeats, doing
from instep.worker.training.inputs import Inputs
from instep.worker.training.private import private_run
from instep.worker.training.readiness import tell_ready
from instep.worker.training.recipe_data import RecipeData, check_order
from instep.worker.training.refusals import measured_by, refusals
from instep.worker.training.trials import Trials, agreed, decided_by_job, refuse_another_result
from instep.worker.training.updating import built_for, turns_for
from instep.worker.training.validation import Validation


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
        self.sized: Callable[[int], None] = lambda workers: None
        """Called with the number of workers of each generation, before its first step."""
        self._near: Near | None = None
        self._data = RecipeData.of(member, recipe)
        self.recipe = self._data.split.recipe
        self.activity = Activity()
        self._heartbeats = Heartbeats(self.activity)
        member.at = self._heartbeats.early
        self.refuse(refusals(self.job, self.recipe, device))
        self._private = private_run(member, self.recipe)
        planned = self._private.planned() if self._private else plan_data(self.job, self.recipe)
        last_step = planned.batches.length(self.job)
        if self._private is not None:
            last_step = self._private.last_step(last_step)
        begun = self._begin(planned)
        model, updates = self._forward.model, round_checks.updates(self.job, last_step)
        self._trials = Trials(self._inputs, updates, begun, self.activity)
        if self._own_data is None:
            self._inputs.warn_of_few_samples()
        entry = Entry(self._inputs, self._trials, self.activity, self._reads, device)
        trial, self._replica = entry.enter_mesh(model, begun)
        self._built, tables = built_for(self.job, self.recipe, model, updates, begun)
        update, turns = turns_for(self.job, self._built, model, self._replica, self._private)
        super().__init__(
            member,
            model,
            self._built.parameters,
            update,
            self._inputs.train,
            self.batches,
            last_step,
            int(self.recipe.batch_loss is not None),
            turns,
            self._replica,
            self.recipe.callbacks,
            take=update.keep if isinstance(update, RoundUpdate) else None,
            activity=self.activity,
        )
        self._hides = self._private is not None or self.job.sync.sealed > 0
        self._equip_engine(trial, tables)
        self._begin_passes(update, own_data.validated_apart(self.job, self._own_data))
        if self._replica is not None:  # all that a state is given to is there
            take_host_copy(self.engine, self._replica)
        self.callbacks.watch(writes_around(self.member, self.engine, self._forward))
        self._record = None if self._hides else self._inputs.record()
        self._once = ReadOnce.of(member, self._inputs.train, self.recipe.train)
        given = self._inputs, planned, self._own_data
        self._unrepeatable = self._data.check(*given, hides=self._hides)
        """A training sample that was different when worker 0 read it again."""
        if self._private is not None:
            self._private.check()
        again = RepeatPass(self.engine, self._forward, self._inputs.train, update)
        self.engine.observers = observers_of(member, self.engine, update, self.after, again)

    def _begin(self, planned: PlannedData) -> Begun:
        """Build the model, and begin to read what it is trained on."""
        member, job, recipe = self.member, self.job, self.recipe
        model, begun = build_model(
            recipe,
            job.seed,
            self.device,
            job.start,
            job.lora,
            load=member.checkpoint is None,  # else the checkpoint has the parameters
            building=measured(job, member.scratch) if job.mesh.ranks > 1 else None,
            rows_in=member.scratch if job.sync.served and not job.sync.leased else None,
        )
        self._reads = make_global(model) if job.train.batch_norm == "global" else None
        self._forward = Forward(recipe, model, self.device, job.train.precision)
        self._own_data = None if self._private else own_data.divide(job, recipe)
        home = self._data.home(self._own_data)
        self._inputs = Inputs.begun(member, self._forward, self._own_data, planned, home)
        self.batches, self.samples = planned.batches, planned.batches.samples
        return begun

    def _equip_engine(self, trial: Trial | None, tables: ServedTables | None) -> None:
        """Give the engine what it holds beside the model, and the loop the replica's others."""
        engine, job = self.engine, self.job
        if self._replica is not None:
            self.fellows = Fellows(self._replica, self.member, engine, self._interrupt)
        if self._data.parted is not None:
            self.after.tell_epochs(self._data.tell_given)
        engine.state.trial = trial
        if job.train.ema is not None:
            engine.state.average = Average(engine.model, job.train.ema)
        if tables and isinstance(engine.turn.strategy, ServerSync):
            engine.tables, engine.turn.strategy.tables = tables, tables.tables
            tables.tables.waiting = self.activity.waiting

    def _begin_passes(self, update: Update, apart: list[int]) -> None:
        """Make what runs the passes of a step and of a validation, and what looks at them.

        Args:
            update: moves the parameters.
            apart: samples of each participant, where they have validation sets of their own.
        """
        alone, inputs = self._replica is None, self._inputs
        if isinstance(update, RoundUpdate) and alone and not self._hides:
            samples = apart or [inputs.validation_samples]
            update.probe = Probe(self._forward, inputs.validate, samples).predictions
        self.compute = compute = self._make_compute(update)
        watched = self.member, self._forward, inputs.train, self.engine.state, self.activity
        self._late = LateTrial(*watched, last=self.last_step, alone=alone)
        self._unthawed = Frozen(self.engine.model)
        parts = self.engine, self.activity, compute, self._skips, self._replica
        self._validation = Validation(inputs, *parts, apart)

    def _make_compute(self, update: Update) -> Compute:
        """How this worker runs its passes."""
        return compute_for(
            self._inputs,
            self.engine,
            update,
            self.activity,
            reads=self._reads,
            replica=self._replica,
            private=self._private,
        )

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
        if self._replica is not None and not self._done:
            return_unused_memory()  # what trials and checks have left
        return done

    def _form(self) -> None:
        self._inputs.mark()
        super()._form()

    def _heartbeat(self) -> Heartbeat:
        done = self._forward.batches + self.engine.passes.taken
        self.callbacks.tell_if_long()
        once = self._once is not None
        return self._heartbeats.within(self._inputs, self.step, self._done, done, once=once)

    def _before_steps(self, comm: Comm) -> None:
        if self._once is not None:
            self._once.committed(self.engine.state.progress.step)
            self._once.let_go()
        self._agree_on_trial(comm)
        if self._once is not None:
            self._once.let_go()
        check_order(comm, self.device, self._loader.order, self._own_data)
        if self._private is not None:
            self._private.check_members(comm, self.device)
        self.compute.begin(comm)
        order, members = self._own_rounds or self._loader.order, self._group.members
        self._near = self._data.meet(comm, self.device, order, members)
        self.sized(comm.size)

    def _lengths(self) -> dict[str, int]:
        return {"train": self.samples, "validate": self._inputs.validation_samples}

    def _best(self) -> Best | None:
        return best_rule(self.job.checkpoint, measured_by(self.recipe))

    @property
    def _merge(self) -> bool:
        return self._trial.merge

    def _lockstep(self, comm: Comm) -> Lockstep:
        by_speed = self.job.train.deal == "speed" and not self._inputs.stays
        return self._deal(comm, by_speed=by_speed, own=self._own_rounds, near=self._near)

    @property
    def _own_rounds(self) -> OwnRounds | None:
        return self._own_data.rounds if self._own_data is not None else None

    @property
    def doing(self) -> str:
        """What this worker is at, as precisely as it is known."""
        return self.callbacks.present or doing(self.activity.phase, self._forward.phase)

    def _try(self) -> Trial:
        if self._private is not None:
            return self._private.trial()
        with self._once.trying() if self._once is not None else nullcontext():
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
        if self.job.check.strict:
            refuse_another_result(trial)

    @property
    def _trial(self) -> Trial:
        assert self.engine.state.trial is not None, "join() comes first"
        return self.engine.state.trial

    def _report_ready(self) -> None:
        tell_ready(self.announcer, self._inputs, self.engine, self._built, self._trial)
        self._announce()

    def _announce(self) -> None:
        self.announcer.ready(
            self._loader, self.batches, self._inputs.validation_samples, self.last_step
        )

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
            fastest = self.engine.assignment.is_fastest
            self._late.try_trained(where, share, self.step, fastest=fastest)
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
        self._data.close()
        self._inputs.close()
        if self._replica is not None:
            self._replica.close()
