"""The main loop of a worker: form groups, run steps, validate and save, recover, finish.

A recipe (`training.py`) and a user's own loop (`own/loop.py`) share it; they differ in who runs
a pass, and in what is built before. All workers run in lockstep: what must happen on all of
them at the same step (stop, validate) follows from the step's number or from what the workers
agreed on in that step. Only the rules of `[stop]` need the master (`stopping.py`).
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.comm.protocol.messages import NOT_FINITE, ON_REQUEST, SPREAD, Form
from instep.data.batches import Batches
from instep.data.loader import Loader, Read
from instep.data.order import Position
from instep.data.participants import OwnRounds
from instep.data.samples import last_read
from instep.data.samples.contents import Record
from instep.engine.alike import check_lengths
from instep.engine.assignment import Lockstep, Near
from instep.engine.engine import Agreement, Engine, make_comms
from instep.engine.member import Member
from instep.engine.observers import Observer
from instep.engine.passes import Share
from instep.engine.skipping import SkipReporter
from instep.engine.slots import Split
from instep.engine.state.committed import Commit, CommittedState
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import CheckpointError, PeerError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.optimizers.plateau import Plateau
from instep.recipe.optimizers.two_points import TwoPoints
from instep.state.retention import Best
from instep.state.save import Shard
from instep.sync import SERVERS
from instep.sync.base import strategy_of
from instep.sync.delayed import Delayed
from instep.sync.rounds.streaming import Streaming
from instep.worker.loop.callbacks import Callbacks
from instep.worker.loop.momentum import move_momentum
from instep.worker.loop.saving import Saver, lend_model, write_shards
from instep.worker.loop.stopping import Stopping
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Dealt, Results
from instep.worker.replica.fellows import Fellows
from instep.worker.rounds.after_round import report_lost, report_spread, spread_of

CALLBACKS = "callbacks"
"""The phase in which the recipe's callbacks are called."""

Shards: TypeAlias = dict[str, Shard] | CheckpointError
"""Files that several members have written, by the name of their group; or why there are none."""

_ENDLESS = 2**40
"""Length of a loop that ends when the user leaves it."""


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


class FellowFailed(PeerError):
    """Another process of this replica lost a peer, and this one may not have noticed."""

    def __init__(self) -> None:
        super().__init__("another process of this replica has lost the group.")


class Loop(ABC):
    """One worker, from its first generation to the saved model.

    Args:
        member: this worker's membership in the run.
        model: built, on its device.
        parameters: those that are trained.
        update: the optimizer step.
        loader: of the training dataset, with its processes started.
        samples: length of the training dataset.
        last_step: of the job; None if the user's loop decides.
        more: passes of a step in addition to one for each micro-batch.
        turns: the updates of a step, instead of `update`, if it has several.
        split: how the parameters lie on the ranks of this replica; None where it is one rank.
        callbacks: called after commits.
        take: as for `Engine`.
        activity: what the worker is doing, where it has begun before this.
    """

    compute: Dealt
    """Knows what the passes of a step read; there once the constructor is done."""

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        parameters: list[nn.Parameter],
        update: Update,
        loader: Loader,
        samples: int,
        last_step: int | None,
        more: int = 0,
        turns: Sequence[TurnState] = (),
        split: Split | None = None,
        callbacks: Sequence[Any] = (),
        take: Callable[[int, Tensor], None] | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.member, self.job, self.samples, self.last_step = member, member.job, samples, last_step
        self.batches = Batches.of_job(self.job, samples)
        self.device = parameters[0].device
        self.activity, self.step = activity or Activity(), 0
        self._model, self._update, self._loader = model, update, loader
        if not turns:
            strategy = strategy_of(self.job.sync, self.job.seed)
            move_momentum(update.optimizer, strategy, self.job.sync.codec)
            if isinstance(strategy, Delayed | Streaming):
                strategy.last = last_step
            turns = [TurnState("", parameters, update, strategy)]
        self.engine = Engine(
            member, model, parameters, turns, ends=self._ends, more=more, split=split, take=take
        )
        self._find_two_points(model)
        self.callbacks = Callbacks(member, self.engine, callbacks, samples)
        self.rule = "steps" if self.job.train.steps else "epochs"
        self.fellows: Fellows | None = None
        """The other processes of this replica, where it has several."""
        self._comms: tuple[Comm, ...] = ()  # of the present groups, or of ones that are forming
        self._regroups = False
        self._stopping: Stopping | None = None
        self._saver: Saver | None = None
        self._record: Record | None = None
        self._skips = SkipReporter(member)
        self._warned: set[str] = set()
        self._told_saved = -1  # step of the newest checkpoint that has been called back for
        self._done = 0  # steps that this process has committed

    def _find_two_points(self, model: nn.Module) -> None:
        """Where an optimizer gives its result at another point, have that saved."""
        points = TwoPoints((turn.update.optimizer for turn in self.engine.turns), model)
        if points:
            check_two_points(self.job, points.name)
            self.state.two_points = points

    # ---- what a recipe and an own loop do differently

    @property
    @abstractmethod
    def _merge(self) -> bool:
        """Whether neighbouring micro-batches are run as one pass."""

    @property
    def _whole(self) -> bool:
        """Whether all micro-batches of a worker are run as one pass."""
        return False

    @property
    def _by_speed(self) -> bool:
        """Whether a slow worker is given fewer micro-batches."""
        return False

    @property
    def _own_rounds(self) -> OwnRounds | None:
        """What participants take of data of their own; None where they have none."""
        return None

    @property
    def _near(self) -> Near | None:
        """Tells what lies where, of a dataset in parts; None where all have all samples."""
        return None

    @abstractmethod
    def _lengths(self) -> dict[str, int]:
        """Samples of each dataset, by its name."""

    @abstractmethod
    def _passes(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Results]:
        """Run this worker's passes of a step; `run` yields what this yields."""

    @abstractmethod
    def _before_steps(self, comm: Comm) -> None:
        """Called when all members have the same state, before their first step."""

    def _validate(self, where: Position) -> dict[str, float] | None:
        """Mean loss and metrics over the validation dataset; None if there is none."""
        return None

    def _best(self) -> Best | None:
        """The rule by which checkpoints are kept for their metrics; None if there is none."""
        return None

    # ---- groups

    @property
    def state(self) -> CommittedState:
        """Of the last commit."""
        return self.engine.state

    @property
    def observers(self) -> Mapping[str, Observer]:
        """The observers of steps, by name."""
        return self.engine.observers

    @property
    def stopping(self) -> Stopping:
        """The rules of `[stop]`; available once a group has formed."""
        assert self._stopping is not None, "join() comes first"
        return self._stopping

    @property
    def phase(self) -> str:
        """Phase of this worker, as `Activity` has it."""
        return self.activity.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.activity.phase = phase

    @property
    def in_flight(self) -> int:
        """The step that is being computed; 0 before the first."""
        return self.step

    @property
    def doing(self) -> str:
        """The phase, as precisely as it is known."""
        return self.callbacks.present or self.phase

    def _regroup(self) -> None:
        """Join the next generation; if a member is lost meanwhile, the one after it."""
        self.phase = "joining"
        while True:
            self.member.wait_for_group()
            if self.fellows is not None:
                self.fellows.meet()
            broken: PeerError | None = None
            try:
                self._form()
            except PeerError as error:
                if not self.member.recovers:
                    raise
                broken = error
            if self._fellows_agree(broken is None):
                return
            self._leave(broken or FellowFailed())

    def _fellows_agree(self, well: bool) -> bool:
        """Ask as `Fellows.agree`; alone, a replica's process need not."""
        return well if self.fellows is None else self.fellows.agree(well)

    def _end_of_step(self) -> None:
        """Continue only if all processes of this replica can: none may wait in a pass for one that
        has left the group."""
        if not self._fellows_agree(True):
            raise FellowFailed

    def _waits(self) -> None:
        """From here on this worker only waits for others."""
        self.phase = "exchange"

    def _interrupt(self) -> None:
        """Abort the exchange, or the forming of a group; called by another thread."""
        for comm in self._comms:
            comm.interrupt()

    def _leave(self, error: PeerError | None = None) -> None:
        """Leave the group: keep what is committed, undo the rest, and tell the master.

        Args:
            error: why the group broke; None if only its members change.
        """
        self.phase = "leaving"
        if error is not None:
            with suppress(OSError):  # a full disk must not end the run
                print(f"instep: the group came apart: {error}", file=sys.stderr, flush=True)
        self.engine.leave()
        self._comms, self._regroups = (), False
        went_back = [observer.go_back() for observer in self.observers.values()]
        if any(went_back) and self._stopping is not None:
            self._stopping.go_back(self.state.progress.step)
        self.step = self.state.progress.step
        self.member.broken(error, holds=self.state.held)

    @property
    def _group(self) -> Form:
        """The members with which this one takes steps."""
        assert self.member.form is not None, "no generation yet"
        return self.member.form

    def _make_comms(self) -> tuple[Comm, Comm]:
        """As `engine.make_comms`."""
        return make_comms(self.member, self.device, self.member.address)

    def _form(self) -> None:
        """Form the group, agree on the last commit, and get ready for the next step.

        Raises:
            PeerError: a member was lost meanwhile.
        """
        member, engine = self.member, self.engine
        self._comms = self._make_comms()
        comm, column = self._comms
        try:
            if member.superseded:  # the message came before there was anything to interrupt
                raise PeerError("the members changed while the group was forming.")
            check_lengths(comm, self.device, **self._lengths())
            given = engine.begin(comm, column)
            self._before_steps(comm)
            engine.start(
                comm,
                column,
                Lockstep(
                    self._group,
                    self.job.per_commit,
                    self.batches,
                    by_speed=self._by_speed,
                    finished=self.compute.finished(comm),
                    mesh=self.job.mesh,
                    unit=self.job.unit,
                    own=self._own_rounds,
                    near=self._near,
                ),
                compare=not given,
            )
            anew = self._group.checkpoint is not None
            self.callbacks.form(anew=anew)
            if self.callbacks.behind():
                self.state.settled = min(self.state.settled, self.state.progress.step - 1)
        except PeerError:
            for each in self._comms:
                each.close()
            raise
        self.step = self.state.progress.step
        last_read.set_step(self.step)
        member.formed()
        if self._stopping is None:
            self._stopping = Stopping(member, comm, self.device)
        self._stopping.regroup(comm)
        if comm.rank != 0 and self._saver is not None:
            self._saver.hand_over()
            self._saver = None
        elif comm.rank == 0 and self._saver is None:
            self._saver = Saver(member, self._model, self._best())
            self._told_saved = -1
        for observer in self.observers.values():
            observer.formed(anew=anew)

    # ---- steps

    def run(self) -> Generator[Any]:
        """Train: yields a `Step` after each commit, and what passes yield.

        If a member is lost and can be replaced, training continues with the others from the
        highest step that one of them has committed. If members are added or removed, the
        group changes between two steps.

        Raises:
            Released: the run continues without this worker.
        """
        while True:
            broken: PeerError | None = None
            try:
                yield from self._generation()
                if not self._regroups:
                    return
            except FellowFailed as error:
                broken = error
            except PeerError as error:
                if not self.member.recovers:
                    raise
                self._fellows_agree(False)
                broken = error
            self._leave(broken)
            self._regroup()

    def _generation(self) -> Iterator[Any]:
        self._model.train()
        state = self.state
        if state.last is not None and (state.settled < self.step or state.last.ends):
            settled = self._settle(state.last)  # at the end too: the worker that saves may be lost
            self._end_of_step()
            yield settled
            if state.last.ends:
                return
        if state.ended:
            self._set_rule(asked=True)
            return
        while (yield from self._steps_until_redistribution()):
            pass

    def _steps_until_redistribution(self) -> Generator[Any, None, bool]:
        """The steps until the generation ends (False), or work is distributed anew (True)."""
        first, dealing = self.step + 1, self.engine.assignment.dealing
        speeds = dealing.speeds
        slices = (each for _, share in self._plan(first) for each in self.compute.slices(share))
        loads = self._loader.read(slices, self._record)
        try:
            for where, share in self._plan(first):
                self.step += 1
                last_read.set_step(self.step)
                done = yield from self._one_step(where, share, loads)
                self._done += 1
                settled = self._settle(done)
                self._end_of_step()
                yield settled
                assert self.state.last is not None
                ends = self.state.last.ends
                self._regroups &= not ends
                if ends or self._regroups:
                    break
                if dealing.speeds != speeds:
                    return True
        finally:
            loads.close()
        return False

    def _plan(self, first: int) -> Iterator[tuple[Position, Share]]:
        last = self.last_step if self.last_step is not None else _ENDLESS
        assignment = self.engine.assignment
        planned = assignment.plan(first, last, merge=self._merge, whole=self._whole)
        for observer in self.observers.values():
            planned = observer.plan(planned, first, assignment.dealing.speeds)
        return planned

    def _one_step(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Commit]:
        """From samples to a commit; for each turn that is left, if a step has several."""
        left = len(self.engine.turns) - self.engine.turn
        if left > 1:
            reads = itertools.tee(itertools.islice(loads, len(share.passes)), left)
            for each in reads[:-1]:
                yield from self._one_turn(where, share, each)
            loads = reads[-1]
        return (yield from self._one_turn(where, share, loads))

    def _one_turn(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Commit]:
        agreed = yield from self._agree(where, share, loads)
        if agreed is None:  # gradients exceeded the lattice: the same passes on a coarser one
            again = self._loader.read(self.compute.slices(share), self._record)
            agreed = yield from self._agree(where, share, again)
            assert agreed is not None, "a strategy wanted a third attempt"
        self._regroups = agreed.regroups
        self.phase = "update"
        done = self._commit()
        strategy, (comm, column) = self.engine.strategy, self._comms
        if comm.rank == 0:
            report_spread(self.member, spread_of(strategy), done.step)
        report_lost(self.member, self.job, strategy, tells=column.rank == 0)
        if not (math.isfinite(done.loss) or self.stopping.spec.non_finite):
            self._warn_of_loss(done.loss)
        return done

    def _agree(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Agreement | None]:
        """Run this worker's passes, and agree with the others on the results."""
        self.engine.begin_step(self.step, where)
        passed = yield from self._passes(where, share, loads)
        return self._exchange(passed, share)

    def _exchange(self, passed: Results, share: Share) -> Agreement | None:
        """Agree with the other workers on the results of all passes."""
        losses, skipped = passed
        epoch = self.engine.where.epoch
        self._skips.report(skipped, dataset="training", step=self.step, epoch=epoch)
        self._waits()
        return self.engine.agree(
            losses,
            stop=self.stopping.asked_to_stop(self.step),
            skipped=len(skipped),
            samples=self.compute.samples(share),
            saves=self._saves_now,
        )

    @property
    def _saves_now(self) -> bool:
        """Whether this worker saves, and it is time for a checkpoint."""
        return self._saver is not None and self._saver.late()

    def _commit(self) -> Commit:
        return self.engine.commit()

    def _ends(self, step: int, agreed: Agreement, norm: float | None) -> bool:
        """Whether this session ends with a step, although no stop was asked for."""
        diverged = bool(self.stopping.not_finite(agreed.loss, norm))
        return (
            diverged
            or bool(self.stopping.too_far_apart(spread_of(self.engine.strategy)))
            or step in (self.last_step, self.job.train.stop_after_steps)
        )

    # ---- what follows a commit

    def _settle(self, done: Commit) -> Step:
        """Apply the rules of `[stop]`, validate, save; repeated if a member is lost meanwhile."""
        self.member.check_lease()
        where = self.batches.of(done.step)
        self._report_epoch(where)
        self.stopping.after_commit(done.step, done.loss, done.norm, last=done.ends)
        metrics = self._validate(where) if done.ends or self._is_time(where) else None
        if metrics is not None and self._is_time(where):
            self._tell_plateaus(done.step, metrics["loss"])
        if metrics is not None and not done.ends:
            stop = self.stopping.after_validation(done.step, metrics)
            self.state.last = done = done._replace(told=stop, ends=stop)
        names = [turn.name for turn in self.engine.turns] if done.losses else []
        losses = dict(zip(names, done.losses, strict=True))
        self.phase = CALLBACKS
        self.callbacks.after_step(done, where, metrics, losses)
        self._save(done, where, metrics)
        if done.ends:
            self._set_rule(done.told, self.stopping.not_finite(done.loss, done.norm))
            apart = self.stopping.too_far_apart(spread_of(self.engine.strategy))
            if not done.told and apart:
                self.rule = SPREAD
                self.stopping.report(apart, self.step, SPREAD)
        self.state.settled = done.step
        ends_epoch = where.stop == self.samples
        return Step(done.step, where.epoch, done.loss, metrics, ends_epoch, losses)

    def _tell_plateaus(self, step: int, loss: float) -> None:
        for turn in self.engine.turns:
            if isinstance(turn.update.scheduler, Plateau):
                turn.update.scheduler.measured(step, loss)

    def _save(self, done: Commit, where: Position, metrics: dict[str, float] | None) -> None:
        self.phase = "saving"
        saver = self._saver
        due = done.ends or done.saves or self.job.checkpoint.due(done.step)
        due = due or (saver is not None and saver.is_best(done.step, metrics))
        own, since = dict[str, Tensor](), time.perf_counter()
        shards: Shards = {}
        if self._written_by_many and (due or metrics is not None):
            saved = due and not self.stopping.diverged
            due, own, shards = self._write_parts(saved, last=done.ends)
        if saver is not None and not self.stopping.diverged:
            saver.after_step(
                self.engine,
                where,
                due=due,
                last=done.ends,
                metrics=metrics,
                own=own,
                shards=shards,
                since=since,
            )
            self._tell_saved(saver)

    @property
    def _written_by_many(self) -> bool:
        """Whether a checkpoint has files that several members write."""
        return bool(self.engine.strategy.laws) or self.job.mesh.ranks > 1

    def _write_parts(self, due: bool, *, last: bool) -> tuple[bool, dict[str, Tensor], Shards]:
        """Have all write what they alone have, if a checkpoint is due: only the worker that saves
        knows which are the best. Whether it is; what single workers have; the files."""
        save = torch.tensor([float(due)], device=self.device)
        self.engine.comm.broadcast(save)
        if not save.item():
            return False, {}, {}
        own = self.engine.own_state()
        return True, own, write_shards(self.engine, self.member, own, last=last)

    def _tell_saved(self, saver: Saver) -> None:
        """Call back for checkpoints that have become complete."""
        if saver.newest != self._told_saved:
            self._told_saved, before = saver.newest, self.phase
            self.phase = CALLBACKS
            self.callbacks.after_save()
            self.phase = before

    def _report_epoch(self, where: Position) -> None:
        if where.stop == self.samples and self.engine.comm.rank == 0:
            progress = self.state.progress
            self.member.emit(
                "epoch_finished",
                epoch=where.epoch,
                step=self.step,
                loss=progress.epoch_loss / progress.epoch_samples,
                samples=progress.epoch_samples,
            )

    def _is_time(self, where: Position) -> bool:
        every = self.job.train.validate_every
        return self.step % every == 0 if every else where.stop == self.samples

    def _set_rule(self, asked: bool, not_finite: str = "") -> None:
        if self.step == self.last_step:
            return
        if not_finite:
            self.rule = NOT_FINITE
            self.stopping.report(not_finite, self.step)
            return
        self.rule = ON_REQUEST if asked else "stop_after_steps"

    def _warn_of_loss(self, loss: float) -> None:
        if "loss" not in self._warned:
            self._warned.add("loss")
            self._warn(f"the loss at step {self.step} is {loss}; training continues")

    def _warn(self, text: str) -> None:
        """Write a warning into the log, once, by one worker."""
        if self.engine.comm.rank == 0 and text not in self._warned:
            self._warned.add(text)
            self.member.emit("warning", text=f"{text}.")

    @property
    def _on_servers(self) -> int:
        """Numbers of embeddings whose rows are on servers."""
        return self.engine.tables.numbers if self.engine.tables is not None else 0

    def _announce(self, **more: Any) -> None:
        self.member.emit(
            "worker_ready",
            worker=self.member.number,
            device=str(self.device),
            threads=torch.get_num_threads(),
            parameters=sum(p.numel() for p in self.engine.parameters) + self._on_servers,
            samples=self.samples,
            last_step=self.last_step,
            loader=f"{self._loader.mode}: {self._loader.why}",
            phases=self.member.phases,
            **more,
        )

    # ---- the end

    def finish(self) -> bool:
        """Save the model and end, together with the others.

        Returns:
            False if a member was lost before all had ended: continue training, then finish again.
        """
        self.phase, broken = "saving", None
        try:
            if not self.member.fenced:
                self._finish_saving()
        except PeerError as error:
            if not self.member.recovers:
                raise
            broken = error
        fenced = self.member.fenced or broken is not None
        if fenced or not self.member.done(self.step, self.rule, finite=self._finite):
            self._leave(broken)
            self._regroup()
            return False
        self.close()
        return True

    def _finish_saving(self) -> None:
        """Write the model; where a replica is a mesh, each rank of the first lends its part."""
        comm = self.engine.comm
        with self.engine.reading():
            if self._saver is not None:
                with self.state.averaged():
                    self._saver.finish(self.step, comm, self.engine.tables)
                self._tell_saved(self._saver)
            elif self.job.mesh.ranks > 1:
                lend_model(comm, self.member, self._model)

    @property
    def _finite(self) -> bool:
        last = self.state.last
        return self.rule != NOT_FINITE and (last is None or math.isfinite(last.loss))

    def released(self) -> None:
        """The run continues without this worker, which first finishes what it is saving."""
        if self._saver is not None:
            self._saver.hand_over()
        self.close()

    def close(self) -> None:
        """Close loaders and group; a second call does nothing."""
        self._loader.close()
        if self._record is not None:
            self._record.close()
        self.engine.leave()


def check_two_points(job: JobSpec, name: str) -> None:
    """Refuse an optimizer with two points where no process has all of both.

    Raises:
        SpecError: servers, rounds or a mesh.
    """
    refused = {
        f"sync.name = {job.sync.name!r}": job.sync.name in SERVERS or job.sync.rounds is not None,
        "[mesh]": job.mesh.ranks > 1,
    }
    if wrong := next((key for key, there in refused.items() if there), ""):
        raise SpecError(
            f"the optimizer {name} trains at one point and gives its result at another (train() "
            f"and eval()), which {wrong} does not know: it would validate and save the wrong one. "
            "Use sync.name = 'all_reduce' without [mesh]."
        )
