"""The one engine: takes a worker's steps from its passes to a commit.

A step is a transaction, for a recipe (`worker/training/training.py`) and for a loop that the
user writes (`own/loop.py`) alike:

- passes compute, and move nothing that outlives the step;
- `agree` does all talking; what is to change then lies staged;
- a vote ends it where a rank could be left in doubt whether the others committed;
- `commit` needs nobody, and moves all in one go: parameters, buffers, what the strategy
  remembers, counters. Or `leave` drops what was staged; or, where the vote got no answer,
  keeps it until the next generation tells (`catch_up.py`).

A step may have several such transactions, its turns, one for each of its optimizers; what
counts of a step counts at its last.

The engine lives as long as its process; `begin` and `leave` bound a generation. Where
the samples come from, and what the loss is, it does not know.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.alone import AloneComm
from instep.comm.base import Comm
from instep.comm.late_errors import LateErrors
from instep.comm.protocol.messages import Form
from instep.data.order import Position
from instep.engine.alike import align_parameters
from instep.engine.assignment import Lockstep
from instep.engine.clock import Clock
from instep.engine.member import Member
from instep.engine.observers import Observer
from instep.engine.served.tables import ServedTables
from instep.engine.state.buffers import Buffers
from instep.engine.state.committed import Commit, CommittedState
from instep.engine.state.copied_commits import CopiedCommits
from instep.engine.state.loading import load
from instep.engine.state.own_state import OwnState
from instep.engine.step.agreement import Agreement, Weighed
from instep.engine.step.exchange import StepExchange
from instep.engine.step.records import StepRecords
from instep.engine.step.running import StepPasses
from instep.engine.turns import TurnState
from instep.records import Attempt
from instep.state.boxes import MeshRank
from instep.sync.generation import Generation, InMesh, Mover, Scattered, Servers


class _Staged(NamedTuple):
    """A step that all have agreed on, and that has not been applied yet."""

    course: int
    number: int
    """Of the commit; that of the step, unless it has several turns."""
    step: int
    where: Position
    agreed: Agreement
    samples: int  # of this worker


class Engine:
    """Commits one worker's steps together with the other workers.

    Args:
        member: this worker's membership in the run.
        model: with the same parameters in every worker.
        parameters: those that are trained, in the same order in every worker.
        turns: the updates of a step: how the workers agree on each, and what moves parameters.
            Each of `parameters` belongs to one.
        ends: whether this start of the run ends with a step, by what was agreed and the norm
            of its gradient; the same on every worker.
        observers: by name; they watch the steps, and may object to one.
        votes: whether every commit is voted for; else only where the strategy needs it.
        more: passes of a step beside those of its micro-batches.
        take: as for `StepPasses`.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        parameters: list[nn.Parameter],
        turns: Sequence[TurnState],
        *,
        take: Callable[[int, Tensor], None] | None = None,
        ends: Callable[[int, Agreement, float | None], bool] = lambda *_: False,
        observers: Mapping[str, Observer] = MappingProxyType({}),
        votes: bool = False,
        more: int = 0,
    ) -> None:
        self.member, self.model = member, model
        self.turns = list(turns)
        mesh = member.job.mesh
        rank = MeshRank(mesh, member.number) if mesh.ranks > 1 else None
        self.state = CommittedState(model, turns, rank)
        self.observers = observers
        self.parameters, self._ends, self._mesh = parameters, ends, mesh
        self._parts = member.job.per_commit.micro_batches
        self._exact = self._parts + more if member.job.train.determinism == "bits" else 0
        self.device = parameters[0].device
        self.tables: ServedTables | None = None
        """The embeddings whose rows are on servers."""
        self.passes = StepPasses(self.turns, take)
        self.applies_staged = True
        """Whether a step in doubt can be applied later; not where the user's code belongs to it."""
        self._staged: _Staged | None = None
        self._in_doubt = False
        self.records = StepRecords(member)
        self._comm: Comm | None = None
        self._column: Comm = AloneComm()
        self.own = OwnState(member, self.state, model, turns[0])
        """What this worker alone has."""
        # what one rank of a mesh has staged, no other of its replica has
        self._votes = votes or self.own.memory is not None or mesh.ranks > 1
        whole = mesh.ranks > 1 and self.device.type == "cpu"
        self.copies = CopiedCommits(member, self.state, self.own) if whole else None
        """Copies of the last commit in memory of the host, where it may come to that."""
        self.clock = Clock(begin=time.time())

    def reading(self) -> AbstractContextManager[None]:
        """Outside of steps, the context in which models ask for rows that servers have; every
        rank enters it.

        Raises:
            PeerError: a rank went away.
        """
        return self.tables.tables.reading() if self.tables is not None else nullcontext()

    # ---- turns

    @property
    def turn(self) -> TurnState:
        """The next of a step's turns; which one it is follows from what is committed."""
        return self.turns[len(self.state.progress.turns)]

    @property
    def ends_step(self) -> bool:
        """Whether this turn is the last of its step."""
        return self.turn is self.turns[-1]

    @property
    def trained(self) -> list[nn.Parameter] | None:
        """What passes of this turn have gradients for; None for all that are trained."""
        return self.turn.parameters if len(self.turns) > 1 else None

    # ---- generations

    def begin(self, comm: Comm, column: Comm) -> bool:
        """A generation begins: all members come to the same commit; every member calls it.

        Args:
            comm: the members.
            column: those that have the same place in their replicas; all, without a mesh.

        Returns:
            Whether a peer gave its state to somebody.

        Raises:
            CheckpointError: the checkpoint to begin from cannot be used.
            PeerError: a member went away meanwhile.
        """
        form = self.member.form
        assert form is not None, "no generation yet"
        if form.checkpoint is not None:
            for memory in (self.own.memory, self.copies):
                if memory is not None:
                    memory.clear()
            if self.state.held and not form.checkpoint:
                # only a fresh process has the state of a beginning; another takes this one's place
                os.kill(os.getpid(), signal.SIGKILL)
            self._drop()
            load(self.state, self.member, comm, column, self.device)
            self.own.load(self.state.own if column.rank == 0 else {})
            if self.tables is not None and form.checkpoint:
                self.tables.load(Path(form.checkpoint), sees=self.member.sees_run)
            self.state.tried = form.generation
            return False
        if not self.applies_staged:
            self._drop()
        prepared = self._staged.number if self._staged is not None else -1
        there = self.state.compare(
            comm, prepared=prepared, start_in_doubt=self.turn.strategy.start_in_doubt
        )
        if self._staged is not None:
            if self._staged[:2] == (there.course, there.number):
                staged, counts = self._staged, self.ends_step
                done = self._apply(self.turn.update.apply)
                if counts:  # the ledger is mended below
                    self.records.tell(done, staged.samples, self.clock)
            self._drop()
        self.turn.strategy.resolve(there.generation)
        if comm.rank == there.root:
            self.records.mend(self.state.progress.step, self.state.rows)
        fresh = not self.state.held
        servers = [form.members.index(number) for number in form.servers]
        if isinstance(self.turn.strategy, Scattered) and {*there.holders} <= {*servers}:
            self.turn.strategy.make_whole(comm, there.root, servers, self.own.memory)
        within = there.within_column(form.rank, len(form.members), self._mesh.ranks)
        self.state.share(column, within)
        if fresh:
            self.own.take_what_was_left()
        self.state.tried = form.generation
        return there.shared

    def own_state(self) -> dict[str, Tensor]:
        """What only single workers have, as `KIND/PARAMETER`: summed over those that have the same
        place in their replicas, all of which call it.

        Raises:
            PeerError: a member went away meanwhile.
        """
        return self.own.summed(self._column)

    def start(
        self, comm: Comm, column: Comm, assignment: Lockstep, *, compare: bool = True
    ) -> None:
        """The steps of the generation are about to begin.

        Args:
            comm: its members.
            column: as for `begin`.
            assignment: who computes what.
            compare: whether to make sure that all hold the same; not where they have just been
                given it.

        Raises:
            RecipeError: the workers built different parameters.
            SpecError: their machines rounded them differently, and bits are to be equal.
            PeerError: a member went away meanwhile.
        """
        if compare:
            whole = not isinstance(self.turn.strategy, Scattered) or self.turn.strategy.whole
            exact = self._exact > 0
            taken = align_parameters(self.model, column, whole=whole, exact=exact)
            if taken is not None:
                self.member.emit("parameters_taken", worker=self.member.number, **taken._asdict())
        self.assignment, form = assignment, assignment.form
        self.buffers = Buffers(self.model, parts=self._exact, alone=self._parts == 1)
        for observer in self.observers.values():
            observer.generation(self.parameters, comm)
        self._exchange = StepExchange(
            self.member, comm, self.turns, self._parts, self.buffers, self.observers, self.copies
        )
        self.clock = Clock(begin=time.time())
        self._computing = [0.0] * comm.size
        self._start_strategies(comm, column, form)
        if self.tables is not None:
            self.tables.let_go()
        self.passes.start(self.buffers, self.observers)
        self._comm, self._column = comm, column
        self.state.inside(form.generation)
        self.state.owners = tuple(worker for worker in form.members if worker not in form.draining)
        if comm.rank == 0:
            self.records.begin()
        if self.copies is not None:
            self.copies.begin(len(form.members), from_peers=form.checkpoint is None)

    def _start_strategies(self, comm: Comm, column: Comm, form: Form) -> None:
        """Tell the strategy of each turn who agrees in the generation."""
        meshed, servers = self._mesh.ranks > 1, None
        if form.servers:
            assert isinstance(self.turn.update, Mover), "the optimizer of servers"
            servers = Servers([form.members.index(n) for n in form.servers], self.turn.update)
        column_members = self._mesh.column(form.members, form.members[form.rank])
        for turn in self.turns:
            turn.strategy.start(
                turn.slots,
                LateErrors(column) if meshed else column,
                Generation(
                    notes=self._exchange.notes,
                    parts=self._exact,
                    memory=self.own.memory,
                    at=Attempt(self.state.progress.course, self.state.number, form.generation),
                    draining=[
                        column_members.index(n) for n in form.draining if n in column_members
                    ],
                    servers=servers,
                    mesh=InMesh(comm, turn.holders) if meshed else None,
                ),
            )

    @property
    def comm(self) -> Comm:
        """The group; there from `start` to `leave`."""
        assert self._comm is not None, "no generation yet"
        return self._comm

    @property
    def started(self) -> bool:
        """Whether a generation's steps have begun and it is not over."""
        return self._comm is not None

    def leave(self) -> None:
        """The generation is over: what was committed stays, what is in doubt stays staged, and
        the rest of the step is undone. A second call does nothing."""
        if self._comm is None:
            return
        if not self._in_doubt:
            self._drop()
        comms, self._comm = (self._comm, self._column), None
        self.passes.stop()
        for turn in self.turns:
            turn.strategy.stop()
        for observer in self.observers.values():
            observer.over()
        for comm in comms:
            comm.close()
        self.records.end()

    def _drop(self) -> None:
        """The step under way does not happen."""
        if self._comm is not None or self._staged is not None:
            self.buffers.undo()
            self.turn.strategy.abandon()
        self._staged, self._in_doubt = None, False
        self.turn.forget()

    # ---- a step

    def begin_step(self, step: int, where: Position) -> None:
        """The passes of a step are about to run, or of its next turn; or to run once more."""
        self.step, self.where = step, where
        self._number = (step - 1) * len(self.turns) + self.turn.number + 1
        course, generation = self.state.progress.course, self.state.generation
        self.turn.strategy.begin_step(Attempt(course, self._number, generation))
        self.passes.begin_step(self.turn)
        for observer in self.observers.values():
            observer.begin_step(step, where)

    def agree(
        self,
        passes: Mapping[int, Weighed],
        *,
        stop: bool,
        skipped: int = 0,
        samples: int = 0,
        saves: bool = False,
        leaving: bool = False,
    ) -> Agreement | None:
        """Exchange what the passes gave: gradients, buffers, the loss, the wish to stop.

        Args:
            passes: number of each of this worker's passes to what it gave.
            stop: whether this worker has been told to stop.
            skipped: samples that its passes lack, since they could not be read.
            samples: that this worker computed, for the record.
            saves: whether this worker knows that it is time for a checkpoint.
            leaving: whether this worker has no further step; then all must have none, and
                nothing is staged.

        Returns:
            The same on every worker. None where all must run their passes of
            this step once more, and agree again.

        Raises:
            SpecError: some workers leave and some have another step.
            DataError: no sample of the global batch could be read.
            RecipeError: nothing in the global batch counts.
            PeerError: another worker went away.
        """
        since = self._passes_done()
        told = self._exchange.run(
            self.turn,
            passes,
            0 if leaving else self.where.size,
            arrived=time.time(),
            computing=self.clock.computing,
            stop=stop,
            saves=saves,
            leaving=leaving,
            skipped=skipped,
            left_out=self.passes.left_out,
        )
        if told is None:
            self.buffers.forget()
            return None
        agreed = told.agreed
        self.buffers.exchange(told.buffers, self.comm, read=told.read)
        if not leaving:
            course = self.state.progress.course
            agreed = agreed._replace(scale=self.turn.strategy.prepare(self.step, agreed.scale))
            self._prepare(_Staged(course, self._number, self.step, self.where, agreed, samples))
        self.clock.exchanged(time.perf_counter() - since, told.waited)
        self._computing = told.computing
        return agreed

    def _passes_done(self) -> float:
        """The time now (of `perf_counter`), once a GPU is done with what it was given."""
        for observer in self.observers.values():
            observer.passes_done()
        since = time.perf_counter()
        if self.device.type != "cuda":
            return since
        torch.cuda.current_stream().synchronize()  # not what is under way between GPUs
        return self.clock.lap(since, "backward")

    def _prepare(self, staged: _Staged) -> None:
        """Everything is here that the commit needs: say so where that matters, by a vote.

        A vote comes back only when every rank has cast its own.
        """
        self._staged = staged
        if self.ends_step:
            self.assignment.prepared(staged.course, staged.step, staged.where)
        if self._votes and self.comm.size > 1:
            self._in_doubt = True
            self.comm.all_reduce(torch.ones(1, device=self.device)).wait()

    # ---- the commit

    def hand_out(self) -> None:
        """Give each parameter its agreed gradient, for those who look at it before `commit`."""
        assert self._staged is not None, "agree() comes first"
        self.turn.hand_out(self._staged.agreed.scale, self._staged.agreed.norm)

    def commit(self, move: Callable[[int], float | None] | None = None) -> Commit:
        """Move the parameters by the agreed gradient, and let the step count, or its turn.

        Args:
            move: moves them in that step, and returns the norm of the gradient if it knows it;
                left out, the engine's own update does.

        Raises:
            PeerError: the others may have gone on without this worker; nothing has moved.
        """
        self.member.lease.check()  # before anything moves
        since, staged, counts = time.perf_counter(), self._staged, self.ends_step
        assert staged is not None, "agree() comes first"
        done = self._apply(move or self.turn.update.apply)
        if self.copies is not None:
            self.copies.keep()
        for observer in self.observers.values():
            observer.committed()
        self.clock.lap(since, "update")
        if not counts:
            return done
        written = self.records.write(self.state.rows)
        self.records.tell(done, staged.samples, self.clock, written)
        why = self.assignment.measured(staged.where, self._computing)
        if why and self.comm.rank == 0:
            self.records.tell_deal(self.assignment, done.step + 1, why)
        self.clock = Clock(begin=time.time())
        return done

    def _apply(self, move: Callable[[int], float | None]) -> Commit:
        """Make what is staged the state of the run. Whatever is raised here ends the process.

        What the workers agreed on beside the gradient is that of a step's last turn; but its loss
        is no number if that of an earlier one is not.
        """
        staged, counts = self._staged, self.ends_step
        assert staged is not None, "nothing is staged"
        step, agreed, turn = staged.step, staged.agreed, self.turn
        self.passes.close()
        self.buffers.apply()
        self.hand_out()
        norms = list[float | None]()
        turn.strategy.apply(lambda: norms.append(move(step)))
        strange = [norm for norm in norms if norm is not None and not math.isfinite(norm)]
        found = [None, *norms, *strange][-1]
        turn.give()
        self.buffers.after_update()
        losses = (*self.state.progress.turns, agreed.loss)
        not_finite = [loss for loss in losses if not math.isfinite(loss)]
        agreed = agreed._replace(loss=[*losses, *not_finite[:1]][-1])
        told = counts and agreed.stop
        ends = told or (counts and self._ends(step, agreed, found))
        losses = losses if len(self.turns) > 1 else ()
        done = Commit(step, agreed.loss, found, told, ends, agreed.skipped, agreed.saves, losses)
        self.state.commit(done, staged.where, self.assignment.records() if counts else ())
        self._staged, self._in_doubt = None, False
        turn.forget()
        self.passes.open()
        return done
