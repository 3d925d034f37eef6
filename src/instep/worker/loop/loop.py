"""The main loop of a worker: form groups, run steps, validate and save, recover, finish.

A recipe (`training/`) and a user's own loop (`own/loop.py`) share it; they differ in who runs
a pass, and in what is built before. All workers run in lockstep: what must happen on all of
them at the same step (stop, validate) follows from the step's number or from what the workers
agreed on in that step. Only the rules of `[stop]` need the master (`stopping.py`).
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from instep.comm.base import Comm
from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.loader import Loader, Read
from instep.data.order import Position
from instep.data.samples import last_read
from instep.data.samples.contents import Record
from instep.engine.alike import check_lengths
from instep.engine.assignment import Lockstep
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.passes import Share
from instep.engine.skipping import SkipReporter
from instep.engine.slots import Split
from instep.engine.state.committed import Commit
from instep.engine.step.agreement import Agreement
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import PeerError, SpecError
from instep.recipe.optimizers.two_points import TwoPoints
from instep.state.retention import Best
from instep.sync.base import strategy_of
from instep.sync.delayed import Delayed
from instep.sync.rounds.streaming import Streaming
from instep.worker.loop.after_commit import AfterCommit
from instep.worker.loop.announcer import Announcer
from instep.worker.loop.callbacks import Callbacks
from instep.worker.loop.comms import make_comms
from instep.worker.loop.momentum import move_momentum
from instep.worker.loop.profiling import StepProfiler
from instep.worker.loop.saving import lend_model
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Dealt, Results
from instep.worker.replica.fellows import FellowFailed, NoFellows

_ENDLESS = 2**40
"""Length of a loop that ends when the user leaves it."""


class Loop(ABC):
    """One worker, from its first generation to the saved model.

    Args:
        member: this worker's membership in the run.
        model: built, on its device.
        parameters: those that are trained.
        update: the optimizer step.
        loader: of the training dataset, with its processes started.
        batches: what each commit takes of its epochs.
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
    after: AfterCommit

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        parameters: list[nn.Parameter],
        update: Update,
        loader: Loader,
        batches: Batches,
        last_step: int | None,
        more: int = 0,
        turns: Sequence[TurnState] = (),
        split: Split | None = None,
        callbacks: Sequence[Any] = (),
        take: Callable[[int, Tensor], None] | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.member, self.job, self.last_step = member, member.job, last_step
        self.batches, self.samples = batches, batches.samples
        self.device = parameters[0].device
        self.activity, self.step = activity or Activity(), 0
        self._model, self._update, self._loader = model, update, loader
        if not turns:
            strategy = strategy_of(self.job.sync, self.job.seed)
            move_momentum(update.optimizer, strategy, self.job.sync.codec)
            if isinstance(strategy, Delayed | Streaming):
                strategy.last = last_step
            turns = [TurnState("", parameters, update, strategy, split=split)]

        def ends(step: int, agreed: Agreement, norm: float | None) -> bool:
            return self.after.ends(step, agreed, norm)

        self.engine = Engine(member, model, parameters, turns, ends=ends, more=more, take=take)
        find_two_points(self.engine)
        self.callbacks = Callbacks(member, self.engine, callbacks, batches)
        self.after = AfterCommit(
            member,
            self.engine,
            self.batches,
            self.callbacks,
            self.activity,
            model=model,
            last_step=last_step,
            validate=self._validate,
            best=self._best,
        )
        self.announcer = Announcer(member, self.engine)
        self.fellows = NoFellows()
        """The other processes of this replica, where it has several."""
        self._comms: tuple[Comm, ...] = ()  # of the present groups, or of ones that are forming
        self._regroups = False
        self._record: Record | None = None
        self._skips = SkipReporter(member)
        self._profiler = StepProfiler(member, self.activity)
        self._done = 0  # steps that this process has committed

    # ---- what a recipe and an own loop do differently

    @property
    @abstractmethod
    def _merge(self) -> bool:
        """Whether neighbouring micro-batches are run as one pass."""

    def _lockstep(self, comm: Comm) -> Lockstep:
        """Who computes what in this generation; all members call it."""
        return self._deal(comm, by_speed=False)

    def _deal(self, comm: Comm, **how: Any) -> Lockstep:
        """Deal to the members what they have not computed yet; `how`, `Lockstep` knows."""
        return Lockstep(
            self._group,
            self.job.per_commit,
            self.batches,
            finished=self.compute.finished(comm),
            mesh=self.job.mesh,
            unit=self.job.unit,
            **how,
        )

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
    def in_flight(self) -> int:
        """The step that is being computed; 0 before the first."""
        return self.step

    @property
    def doing(self) -> str:
        """The phase, as precisely as it is known."""
        return self.callbacks.present or self.activity.phase

    def _regroup(self) -> None:
        """Join the next generation; if a member is lost meanwhile, the one after it."""
        self.activity.enter("joining")
        while True:
            self.member.wait_for_group()
            self.fellows.meet()
            broken: PeerError | None = None
            try:
                self._form()
            except PeerError as error:
                if not self.member.recovers:
                    raise
                broken = error
            if self.fellows.agree(broken is None):
                return
            self._leave(broken or FellowFailed())

    def _interrupt(self) -> None:
        """Abort the exchange, or the forming of a group; called by another thread."""
        for comm in self._comms:
            comm.interrupt()

    def _leave(self, error: PeerError | None = None) -> None:
        """Leave the group: keep what is committed, undo the rest, and tell the master.

        Args:
            error: why the group broke; None if only its members change.
        """
        self.activity.enter("leaving")
        self._profiler.drop()
        if error is not None:
            with suppress(OSError):  # a full disk must not end the run
                print(f"instep: the group came apart: {error}", file=sys.stderr, flush=True)
        self.engine.leave()
        self._comms, self._regroups = (), False
        went_back = [observer.go_back() for observer in self.engine.observers.values()]
        self.step = self.engine.state.progress.step
        if any(went_back):
            self.after.go_back(self.step)
        self.member.broken(error, holds=self.engine.state.held)

    @property
    def _group(self) -> Form:
        """The members with which this one takes steps."""
        assert self.member.form is not None, "no generation yet"
        return self.member.form

    def _make_comms(self) -> tuple[Comm, Comm]:
        """As `comms.make_comms`."""
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
                self._lockstep(comm),
                compare=not given,
            )
            anew = self._group.checkpoint is not None
            self.callbacks.form(anew=anew)
            if self.callbacks.behind():
                engine.state.settled = min(engine.state.settled, engine.state.progress.step - 1)
        except PeerError:
            for each in self._comms:
                each.close()
            raise
        self.step = self.engine.state.progress.step
        last_read.set_step(self.step)
        member.formed()
        self.after.regroup(comm)
        for observer in self.engine.observers.values():
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
                self.fellows.agree(False)
                broken = error
            self._leave(broken)
            self._regroup()

    def _generation(self) -> Iterator[Any]:
        self._model.train()
        state = self.engine.state
        if state.last is not None and (state.settled < self.step or state.last.ends):
            # at the end too: the worker that saves may be lost
            settled = self.after.settle(state.last)
            self.fellows.go_on()
            yield settled
            if state.last.ends:
                return
        if state.ended:
            self.after.end(self.step, asked=True)
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
                self._profiler.begin(self.step)
                done = yield from self._one_step(where, share, loads)
                self._profiler.end(self.step, last=done.ends)
                self._done += 1
                settled = self.after.settle(done)
                self.fellows.go_on()
                yield settled
                assert self.engine.state.last is not None
                ends = self.engine.state.last.ends
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
        planned = assignment.plan(first, last, merge=self._merge, whole=self.compute.whole)
        for observer in self.engine.observers.values():
            planned = observer.plan(planned, first, assignment.dealing.speeds)
        return planned

    def _one_step(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Commit]:
        """From samples to a commit; for each turn that is left, if a step has several."""
        left = len(self.engine.turns) - self.engine.turn.number
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
        self.activity.enter("update")
        done = self._commit()
        self.announcer.commit(done, self._comms[1], warns=not self.after.stopping.spec.non_finite)
        return done

    def _agree(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Any, None, Agreement | None]:
        """Run this worker's passes, and agree with the others on the results."""
        self._loader.tell(where.epoch)  # a worker without samples has a scheduler too
        self.engine.begin_step(self.step, where)
        passed = yield from self._passes(where, share, loads)
        return self._exchange(passed, share)

    def _exchange(self, passed: Results, share: Share) -> Agreement | None:
        """Agree with the other workers on the results of all passes."""
        losses, skipped = passed
        epoch = self.engine.where.epoch
        self._skips.report(skipped, dataset="training", step=self.step, epoch=epoch)
        self.activity.enter("exchange")
        return self.engine.agree(
            losses,
            stop=self.after.stopping.asked_to_stop(self.step),
            skipped=len(skipped),
            samples=self.compute.samples(share),
            saves=self.after.is_late,
        )

    def _commit(self) -> Commit:
        return self.engine.commit()

    # ---- the end

    def finish(self) -> bool:
        """Save the model and end, together with the others.

        Returns:
            False if a member was lost before all had ended: continue training, then finish again.
        """
        self.activity.enter("saving")
        broken = None
        try:
            if not self.member.lease.fenced:
                self._finish_saving()
        except PeerError as error:
            if not self.member.recovers:
                raise
            broken = error
        fenced = self.member.lease.fenced or broken is not None
        if fenced or not self.member.done(self.step, self.after.rule, finite=self.after.finite):
            self._leave(broken)
            self._regroup()
            return False
        self.close()
        return True

    def _finish_saving(self) -> None:
        """Write the model; where a replica is a mesh, each rank of the first lends its part."""
        comm = self.engine.comm
        with self.engine.reading():
            if not self.after.save_model(self.step) and self.job.mesh.ranks > 1:
                lend_model(comm, self.member, self._model)

    def released(self) -> None:
        """The run continues without this worker, which first finishes what it is saving."""
        self.after.hand_over()
        self.close()

    def close(self) -> None:
        """Close loaders and group; a second call does nothing."""
        self._loader.close()
        if self._record is not None:
            self._record.close()
        self.engine.leave()


def find_two_points(engine: Engine) -> None:
    """Where an optimizer gives its result at another point, have that saved.

    Raises:
        SpecError: servers, rounds or a mesh, where no process has all of both points.
    """
    points = TwoPoints((turn.update.optimizer for turn in engine.turns), engine.model)
    if not points:
        return
    job = engine.member.job
    refused = {
        f"sync.name = {job.sync.name!r}": job.sync.served or job.sync.rounds is not None,
        "[mesh]": job.mesh.ranks > 1,
    }
    if wrong := next((key for key, there in refused.items() if there), ""):
        raise SpecError(
            f"the optimizer {points.name} trains at one point and gives its result at another "
            f"(train() and eval()), which {wrong} does not know: it would validate and save the "
            "wrong one. Use sync.name = 'all_reduce' without [mesh]."
        )
    engine.state.two_points = points
