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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from instep.engine.alike import check_parameters
from instep.engine.assignment import Lockstep
from instep.engine.clock import Clock
from instep.engine.gradients import Gradients
from instep.engine.member import Member
from instep.engine.observers import Observer
from instep.engine.passes import Pass
from instep.engine.served.tables import ServedTables
from instep.engine.skipping import scale_gradients, share_read
from instep.engine.slots import Split, give
from instep.engine.state.buffers import Buffers
from instep.engine.state.catch_up import Beginning
from instep.engine.state.committed import Commit, CommittedState
from instep.engine.state.copied_commits import CopiedCommits
from instep.engine.state.loading import load
from instep.engine.state.own_state import OwnState
from instep.engine.step.agreement import (
    Agreement,
    Weighed,
    agreement,
    notes_of_a_step,
    refuse_unequal_ends,
)
from instep.engine.step.records import StepRecords
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import PeerError, Unrepeatable, WorkerError
from instep.records import Attempt
from instep.state.boxes import MeshRank
from instep.sync.base import Strategy
from instep.sync.generation import Generation, InMesh, Mover, Scattered, Servers
from instep.sync.norm import norm, squares


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
        split: how the parameters lie on the ranks of this replica; None where it is one rank.
        take: called with slot and gradient as each backward pass completes it; left out, all of
            them are the step's.
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
        split: Split | None = None,
    ) -> None:
        self.member, self.model = member, model
        self.turns = list(turns)
        mesh = member.job.mesh
        rank = MeshRank(mesh, member.number) if split is not None else None
        self.state = CommittedState(model, turns, rank)
        self.observers = observers
        self.parameters, self._ends = parameters, ends
        self._mesh, self._split = mesh, split
        self._parts = member.job.per_commit.micro_batches
        self._exact = self._parts + more if member.job.train.determinism == "bits" else 0
        self.device = parameters[0].device
        self.tables: ServedTables | None = None
        """The embeddings whose rows are on servers."""
        self._take = take or self.gradient
        self._to_strategy = True
        self.applies_staged = True
        """Whether a step in doubt can be applied later; not where the user's code belongs to it."""
        self._staged: _Staged | None = None
        self._handed_out = self._slots_filled = self._in_doubt = False
        self._left_out = 0  # by the user's collate, of this step's samples
        self._half_moved = False  # the update began, and has not ended
        self.records = StepRecords(member)
        self._comm: Comm | None = None
        self._column: Comm = AloneComm()
        self._slots = [turn.parameters for turn in turns]
        self._holders = list[list[tuple[int, ...]]]([] for _ in turns)
        if split is not None:
            self._slots = [split.slots(turn.parameters) for turn in turns]
            self._holders = [[*map(split.holders, turn.parameters)] for turn in turns]
        self.own = OwnState(member, self.state, model, turns[0], self._slots[0], self._holders[0])
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
    def turn(self) -> int:
        """Which of a step's turns is next, from 0; it follows from what is committed."""
        return len(self.state.progress.turns)

    @property
    def strategy(self) -> Strategy:
        """Of this turn."""
        return self.turns[self.turn].strategy

    @property
    def update(self) -> Update:
        """Of this turn."""
        return self.turns[self.turn].update

    @property
    def slots(self) -> list[nn.Parameter]:
        """What this rank has of the parameters of this turn; see `slots.py`."""
        return self._slots[self.turn]

    @property
    def ends_step(self) -> bool:
        """Whether this turn is the last of its step."""
        return self.turn == len(self.turns) - 1

    @property
    def trained(self) -> list[nn.Parameter] | None:
        """What passes of this turn have gradients for; None for all that are trained."""
        return self.turns[self.turn].parameters if len(self.turns) > 1 else None

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
            comm, prepared=prepared, start_in_doubt=self.strategy.start_in_doubt
        )
        if self._staged is not None:
            if self._staged[:2] == (there.course, there.number):
                staged, counts = self._staged, self.ends_step
                done = self._apply(self.update.apply)
                if counts:  # the ledger is mended below
                    self.records.tell(done, staged.samples, self.clock)
            self._drop()
        self.strategy.resolve(there.generation)
        if comm.rank == there.root:
            self.records.mend(self.state.progress.step, self.state.rows)
        fresh = not self.state.held
        servers = [form.members.index(number) for number in form.servers]
        if isinstance(self.strategy, Scattered) and {*there.holders} <= {*servers}:
            self.strategy.make_whole(comm, there.root, servers, self.own.memory)
        self.state.share(column, self._within_column(there))
        if fresh:
            self.own.take_what_was_left()
        self.state.tried = form.generation
        return there.shared

    def _within_column(self, there: Beginning) -> Beginning:
        """The same, by ranks of the column."""
        form, ranks = self.member.form, self._mesh.ranks
        assert form is not None, "no generation yet"
        if ranks == 1:
            return there
        own = [rank // ranks for rank in there.holders if (rank - form.rank) % ranks == 0]
        if not own:
            raise PeerError("no member holds this part of the model.")
        return there._replace(root=own[0], shared=len(own) < len(form.members) // ranks)

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
            PeerError: a member went away meanwhile.
        """
        if compare:
            whole = not isinstance(self.strategy, Scattered) or self.strategy.whole
            check_parameters(self.model, column, whole=whole)
        self.assignment, form = assignment, assignment.form
        self.buffers = Buffers(self.model, parts=self._exact, alone=self._parts == 1)
        for observer in self.observers.values():
            observer.generation(self.parameters, comm)
        self._notes = notes_of_a_step(
            comm.size,
            self._parts,
            buffers=len(self.buffers),
            squares=self._mesh.ranks if self._measures else 0,
            meshed=self._mesh.ranks > 1,
            uncopied=len(self.copies.notes) if self.copies is not None else 0,
            **{name: observer.size for name, observer in self.observers.items()},
        )
        self._base = self.member.started  # Unix seconds, the same in every worker
        self.clock = Clock(begin=time.time())
        self._computing = [0.0] * comm.size
        self._start_strategies(comm, column, form)
        if self.tables is not None:
            self.tables.let_go()
        self.gradients = [Gradients(slots, self._take) for slots in self._slots]
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
            assert isinstance(self.update, Mover), "the optimizer of servers"
            servers = Servers([form.members.index(n) for n in form.servers], self.update)
        column_members = self._mesh.column(form.members, form.members[form.rank])
        for turn, slots, holders in zip(self.turns, self._slots, self._holders, strict=True):
            turn.strategy.start(
                slots,
                LateErrors(column) if meshed else column,
                Generation(
                    notes=0 if meshed else self._notes.size,
                    parts=self._exact,
                    memory=self.own.memory,
                    at=Attempt(self.state.progress.course, self.state.number, form.generation),
                    draining=[
                        column_members.index(n) for n in form.draining if n in column_members
                    ],
                    servers=servers,
                    mesh=InMesh(comm, holders) if meshed else None,
                ),
            )

    @property
    def comm(self) -> Comm:
        """The group; there from `start` to `leave`."""
        assert self._comm is not None, "no generation yet"
        return self._comm

    @property
    def taken(self) -> int:
        """Gradients that the passes of this generation gave so far: a sign of life."""
        return sum(each.count for each in self.gradients) if self._comm is not None else 0

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
        for gradients, turn in zip(self.gradients, self.turns, strict=True):
            gradients.close()
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
            self.strategy.abandon()
        self._staged, self._in_doubt = None, False
        self._handed_out = self._slots_filled = False

    # ---- passes

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete, of this parameter: observers see it, the strategy keeps it."""
        for observer in self.observers.values():
            observer.gradient(slot, gradient)
        if self._to_strategy:
            self.strategy.gradient(slot, gradient)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Only observers see the gradients of passes that run meanwhile, and nothing of them stays.

        Nor does anything stay of what the step's own passes did to buffers: it is not to happen.
        """
        self.buffers.undo()
        self._to_strategy = False
        try:
            yield
        finally:
            self._to_strategy = True
            self.buffers.undo()

    def begin_step(self, step: int, where: Position) -> None:
        """The passes of a step are about to run, or of its next turn; or to run once more."""
        self.step, self.where = step, where
        self._number = (step - 1) * len(self.turns) + self.turn + 1
        course, generation = self.state.progress.course, self.state.generation
        self.strategy.begin_step(Attempt(course, self._number, generation))
        self.buffers.begin_step()
        self._left_out = 0
        for observer in self.observers.values():
            observer.begin_step(step, where)

    def begin_pass(self, part: Pass, weight: float, *, last: bool, unit: int | None = None) -> None:
        """A backward pass is about to run that counts `weight`, over the samples of the step.

        Raises:
            WorkerError: the last update raised, and the loop continues as if it had not.
        """
        if self._half_moved:
            raise WorkerError(
                "the optimizer or the scheduler raised in the middle of a step, and parameters may "
                "have moved in part: this process cannot go on. Let the error end the program; "
                "another takes up the last commit."
            )
        self.strategy.begin_pass(weight, last=last, unit=part.number if unit is None else unit)
        for observer in self.observers.values():
            observer.begin_pass(part)

    def end_pass(
        self, part: Pass, share: float, *, beside: bool = False, left_out: int = 0
    ) -> None:
        """It is over.

        Args:
            part: the pass.
            share: what it has of the samples; 0 where it was another's, repeated: then it
                leaves nothing.
            beside: whether it is one beside those that compute the samples.
            left_out: samples that it was dealt, and that the user's `collate` left out.
        """
        for observer in self.observers.values():
            observer.end_pass(part)
        self._left_out += left_out
        self.buffers.after_pass(share, part.number, beside=beside)

    def skip_pass(self, part: Pass, share: float = 0.0, *, left_out: int = 0) -> None:
        """A forward pass was run in which no loss counts; buffers move by its samples too.

        Args:
            part, share, left_out: as for `end_pass`; without a share it leaves nothing.
        """
        self._left_out += left_out
        self.buffers.after_pass(share, part.number)

    # ---- the agreement

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
        arrived = time.time()
        notes = self._own_notes(passes, skipped)
        for name, given in {"stop": stop, "saves": saves, "leaving": leaving}.items():
            notes[name] = [float(given)]
        notes["arrived"][self.comm.rank] = arrived - self._base
        summed = self._exchange(notes)
        if summed is None:
            self.buffers.forget()
            return None
        said = self._notes.unpack(summed)
        refuse_unequal_ends(said["leaving"][0], self.comm.size)
        for name, observer in self.observers.items():
            observer.judge(said[name])
        if self.copies is not None:
            self.copies.judge(said["uncopied"], self.comm)
        whole = 0 if leaving else self.where.size
        agreed = agreement(said, whole, norm(said["squares"]) if self._measures else None)
        read = share_read(agreed.skipped, whole, round(said["left_out"][0]))
        self.buffers.exchange(said["buffers"], self.comm, read=read)
        if not leaving:
            course = self.state.progress.course
            agreed = agreed._replace(scale=self.strategy.prepare(self.step, agreed.scale))
            self._prepare(_Staged(course, self._number, self.step, self.where, agreed, samples))
        took = time.perf_counter() - since
        self._base += max(said["arrived"])
        self.clock.exchanged(took, max(0.0, self._base - arrived))
        self._computing = said["computing"]
        return agreed

    def _exchange(self, notes: dict[str, list[float]]) -> Tensor | None:
        """Exchange gradients and notes; what the strategy's `exchange` returns.

        On a mesh the strategy knows one rank of each replica. Notes are for all ranks, and each
        adds what it has of the norm.
        """
        whole = self._mesh.ranks == 1
        try:
            packed = self._notes.pack(notes) if whole else torch.zeros(0, dtype=torch.float64)
            found = self.strategy.exchange(packed)
        except Unrepeatable as error:
            for observer in self.observers.values():
                observer.unrepeatable(error)
            raise
        if whole:
            return found
        fits = found is not None
        place = divmod(self.comm.rank, self._mesh.ranks)
        if not fits:
            notes["again"] = [1.0]
        elif self._measures:
            self._fill_slots()
        if fits and self._measures and place[0] == 0:
            notes["squares"][place[1]] = self.squares()
        summed = self._notes.pack(notes)
        self.comm.all_reduce(summed).wait()
        if not self._notes.unpack(summed)["again"][0]:
            return summed
        if fits:  # elsewhere they did not, so that this step begins again
            self.strategy.abandon()
        self._slots_filled = False
        return None

    def squares(self) -> float:
        """The sum of the squares of this rank's part of the gradient, as it lies in the slots."""
        assert self._split is not None, "a mesh"
        pairs = zip(self.slots, self.turns[self.turn].parameters, strict=True)
        gradients = [s.grad for s, p in pairs if s.grad is not None and self._split.counts(p)]
        return math.fsum(squares(gradients).tolist())

    def _fill_slots(self) -> None:
        """Give each slot its agreed gradient, once."""
        if not self._slots_filled:
            self.strategy.hand_out()
            self._slots_filled = True

    @property
    def _measures(self) -> bool:
        """Whether the norm of a gradient that lies on several ranks is wanted."""
        return self._mesh.ranks > 1 and any(turn.update.clips for turn in self.turns)

    def _passes_done(self) -> float:
        """The time now (of `perf_counter`), once a GPU is done with what it was given."""
        for observer in self.observers.values():
            observer.passes_done()
        since = time.perf_counter()
        if self.device.type != "cuda":
            return since
        torch.cuda.current_stream().synchronize()  # not what is under way between GPUs
        return self.clock.lap(since, "backward")

    def _own_notes(self, passes: Mapping[int, Weighed], skipped: int) -> dict[str, list[float]]:
        own = self._notes.blank()
        own["regroups"] = [float(self.member.regroups)]
        own["computing"][self.comm.rank] = self.clock.computing
        own["skipped"], own["left_out"] = [float(skipped)], [float(self._left_out)]
        for number, (total, weight) in passes.items():
            own["losses"][number], own["weights"][number] = total, weight
        own["buffers"] = self.buffers.marks()
        if self.copies is not None:
            own["uncopied"] = self.copies.notes
        for name, observer in self.observers.items():
            own[name] = observer.notes()
        return own

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
        self._fill_slots()
        agreed, turn = self._staged.agreed, self.turns[self.turn]
        if agreed.scale != 1.0:
            scale_gradients(self.slots, agreed.scale)
        give(self.slots, turn.parameters)
        turn.update.known_norm = agreed.norm
        self._handed_out = True

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
        done = self._apply(move or self.update.apply)
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
        step, agreed = staged.step, staged.agreed
        self._half_moved = True
        self.buffers.apply()
        if not self._handed_out:
            self.hand_out()
        norms = list[float | None]()
        self.strategy.apply(lambda: norms.append(move(step)))
        strange = [each for each in norms if each is not None and not math.isfinite(each)]
        found = [None, *norms, *strange][-1]
        give(self.slots, self.turns[self.turn].parameters)
        self.buffers.after_update()
        losses = (*self.state.progress.turns, agreed.loss)
        not_finite = [loss for loss in losses if not math.isfinite(loss)]
        agreed = agreed._replace(loss=[*losses, *not_finite[:1]][-1])
        told = counts and agreed.stop
        ends = told or (counts and self._ends(step, agreed, found))
        losses = losses if len(self.turns) > 1 else ()
        done = Commit(
            step, agreed.loss, found, told, ends, agreed.skipped, saves=agreed.saves, losses=losses
        )
        self.state.commit(done, staged.where, self.assignment.records() if counts else ())
        self._staged, self._in_doubt = None, False
        self._handed_out = self._slots_filled = False
        self._half_moved = False
        return done
