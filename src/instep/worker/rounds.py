"""The rounds of averaging: a participant takes its local steps, and gives how far it came.

A participant is a unit of the job's, whoever computes it. It begins from the parameters,
buffers, optimizer and scheduler of the round's beginning, draws by keys of its own, and leaves
nothing behind: what it moved is put back. How the participants' ways are averaged, the
strategy knows (`sync/averaging.py`); what the mean does is `RoundUpdate.apply`. Where the
members change within a round, those that go on keep what they have computed of it.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.data.loader import Read, Skipped, Slice
from instep.data.order import Position, key, micro_batch
from instep.errors import PeerError, SpecError
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.rehearsal import called_backward
from instep.spec import JobSpec
from instep.worker.step.assignment import Finished, finished
from instep.worker.step.engine import Engine, Weighed
from instep.worker.step.passes import OF_PASS, Pass, Share
from instep.worker.step.update import OF_UPDATE, Update
from instep.worker.trial_result import Trial


class RoundUpdate(Update):
    """Moves parameters in local steps, and at the end of a round by the mean of all of them.

    Args:
        local_steps: of a round.
        given: what `Update` takes.
    """

    def __init__(self, *given: Any, local_steps: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._local_steps = local_steps

    @torch.no_grad()
    def apply(self, step: int) -> float | None:
        """End a round: take the agreed mean off the parameters of its beginning.

        The scheduler advances by the local steps of the round, as it did for each participant.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
        for _ in range(self._local_steps):
            self._advance()
        return None

    def take_step(self, *number: int) -> None:
        """A local step, by the `.grad` of this participant alone; `number` is what is keyed by."""
        set_generators(key(self._seed, OF_UPDATE, *number))
        self.clip()
        self.optimizer.step()
        self._advance()

    def leave_step(self) -> None:
        """A local step in which nothing counts: only the scheduler goes on."""
        self._advance()

    def _advance(self) -> None:
        if self.scheduler is None:
            return
        with warnings.catch_warnings():  # of a worker that no participant has, or of its first
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\)")
            self.scheduler.step()

    @contextmanager
    def one_participant(self) -> Iterator[list[Tensor]]:
        """What moves in it, of parameters, optimizer and scheduler, is put back at its end.

        Yields:
            The parameters as they are now.
        """
        optimizer, scheduler = self.optimizer, self.scheduler
        begin = [parameter.detach().clone() for parameter in self._parameters]
        state = {p: copy.deepcopy(own) for p, own in optimizer.state.items()}
        groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None
        try:
            yield begin
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters, begin, strict=True):
                    parameter.copy_(value)
                    parameter.grad = None
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(kept)
            if scheduler is not None:
                scheduler.load_state_dict(schedule)


class _Way(NamedTuple):
    """A participant that is computed: all that the round needs of it."""

    part: Pass
    total: float
    """Of its losses."""
    weight: float
    size: int
    skipped: list[Skipped]
    moved: list[Tensor]
    """How far its parameters came, backwards."""
    buffers: dict[int, Tensor]
    """That it moved, as `Buffers` numbers them."""


class Rounds:
    """How one worker computes the participants that it was dealt.

    Args:
        engine, forward, update: the worker's; the engine's gradients come here.
        job: says how a round is cut.
        left: whether the members have changed meanwhile.
        at: told what is being done: `loading`, `forward` or `backward`.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        update: RoundUpdate,
        job: JobSpec,
        left: Callable[[], bool],
        at: Callable[[str], None],
    ) -> None:
        self._engine, self._forward, self._update = engine, forward, update
        self._seed, self._local_steps = job.seed, job.sync.local_steps
        self._left, self._is_at = left, at
        self._participants = job.per_commit.micro_batches
        self._at = (0, 0)  # course and number of a round
        self._ways: dict[int, _Way] = {}  # of its participants, by number
        self._there: frozenset[Slice] = frozenset()
        """The samples of those that this generation need not compute: of its first round. They
        stay until it is over, as what is read may be asked for when that round is."""
        engine.take = self._keep

    def _keep(self, slot: int, gradient: Tensor) -> None:
        """A gradient stays where the backward pass left it, for the local step."""
        self._engine.parameters[slot].grad = gradient

    def finished(self, comm: Comm, course: int, step: int) -> Finished:
        """What the members have computed of a round that an earlier generation began; all call it.

        Raises:
            PeerError: a member went away.
        """
        self._go_to(course, step)
        table = torch.zeros(comm.size, self._participants, device=self._engine.parameters[0].device)
        table[comm.rank, list(self._ways)] = 1.0
        comm.all_reduce(table).wait()
        self._there = frozenset(way.part.samples for way in self._ways.values())
        return finished(step, [row.nonzero().flatten().tolist() for row in table])

    def _go_to(self, course: int, step: int) -> None:
        """What was computed for another round is of no use."""
        if self._at != (course, step):
            self._at, self._ways = (course, step), {}

    def slices(self, share: Share) -> Iterator[Slice]:
        """The samples of each local step of each participant that is to be computed, in order."""
        for part in share.passes:
            if part.samples not in self._there:
                yield from (samples for _, samples in self._local(part))

    def _local(self, part: Pass) -> Iterator[tuple[int, Slice]]:
        """Number and samples of a participant's local steps; those without samples are left out."""
        epoch, first, stop = part.samples
        for number in range(self._local_steps):
            low, high = micro_batch(first, stop, number, self._local_steps)
            if high > low:
                yield number, Slice(epoch, low, high)

    def run(
        self, where: Position, share: Share, loads: Iterator[Read], step: int
    ) -> tuple[dict[int, Weighed], list[Skipped]]:
        """Compute this worker's participants of a round.

        Returns:
            What each one's losses came to, by its number, and the samples that could not be read.

        Raises:
            PeerError: the members have changed; everything is as at the begin of the round.
        """
        engine, whole = self._engine, where.stop - where.first
        self._go_to(engine.state.progress.course, step)
        losses: dict[int, Weighed] = {}
        skipped: list[Skipped] = []
        for part in share.passes:
            if part.samples in self._there:
                way = self._ways[part.number]
                engine.buffers.move(way.buffers)
            else:
                way = self._ways[part.number] = self._way(part, loads, step)
            skipped += way.skipped
            if not way.weight:
                engine.skip_pass(part)
                continue
            losses[part.number] = Weighed(way.total, way.weight)
            engine.begin_pass(part, way.weight / whole, last=False)
            for slot, moved in enumerate(way.moved):
                engine.gradient(slot, moved)
            engine.end_pass(part, way.size / whole)
        return losses, skipped

    def _way(self, part: Pass, loads: Iterator[Read], step: int) -> _Way:
        """Compute a participant; what it did to buffers is left for the engine to see."""
        skipped: list[Skipped] = []
        with self._update.one_participant() as begin:
            total, weight, size = self._steps(part, loads, step, skipped)
            moved = [
                torch.sub(before, parameter.detach())
                for before, parameter in zip(begin, self._engine.parameters, strict=True)
            ]
        buffers = self._engine.buffers.moved_by_pass()
        return _Way(part, total, weight, size, skipped, moved, buffers)

    def _steps(
        self, part: Pass, loads: Iterator[Read], step: int, skipped: list[Skipped]
    ) -> tuple[float, float, int]:
        """A participant's local steps: the total of their losses, its weight, and the samples."""
        engine, clock = self._engine, self._engine.clock
        total = weight = 0.0
        size = 0
        cuts = dict(self._local(part))
        for number in range(self._local_steps):
            if self._left():
                raise PeerError("the members have changed in the middle of a round.")
            since = time.perf_counter()
            self._is_at("loading")
            read = next(loads) if number in cuts else None
            since = clock.lap(since, "load")
            if read is None or not read.size:
                skipped += read.skipped if read is not None else []
                self._update.leave_step()
                continue
            skipped += read.skipped
            size += read.size
            self._is_at("forward")
            set_generators(key(self._seed, OF_PASS, step, part.number, number))
            taken = engine.taken
            found = self._forward.loss(read.batch, read.size)
            if engine.taken != taken:
                raise called_backward()
            if found is None:
                self._update.leave_step()
                continue
            total += float(found.loss.detach()) * found.factor
            weight += found.weight
            since = clock.lap(since, "forward")
            self._is_at("backward")
            found.loss.backward()
            self._update.take_step(step, part.number, number)
            for parameter in engine.parameters:
                parameter.grad = None
            clock.lap(since, "backward")
        return total, weight, size


def check(job: JobSpec, recipe: Recipe) -> None:
    """Refuse a recipe of which a participant alone cannot take a step.

    Raises:
        SpecError: its loss is of the whole global batch, or a round would take more samples than
            there are.
    """
    if recipe.batch_loss is not None:
        raise SpecError(
            f"sync.name = {job.sync.name!r}: participants take their steps apart, and "
            "Recipe.batch_loss is of the global batch of all of them. Use "
            "sync.name = 'all_reduce', or give compute_loss instead."
        )
    batch, samples = job.train.global_batch, len(recipe.train)
    most = -(-samples // batch)
    if job.sync.local_steps > most:
        raise SpecError(
            f"sync.local_steps = {job.sync.local_steps}: the {samples} samples of an epoch are "
            f"{most} local steps of train.global_batch = {batch}, and a round does not go beyond "
            f"its epoch. Set sync.local_steps to at most {most}."
        )


def verdict(trial: Trial, job: JobSpec) -> Trial:
    """What a trial comes to where participants take steps of their own."""
    return trial._replace(
        merge=False,
        reason="each participant of a round is computed apart",
        verdict=(
            f"no: sync.name = {job.sync.name!r} averages {job.sync.participants} participants "
            f"after {job.sync.local_steps} local steps of each. With sync.name = 'all_reduce' the "
            "run takes the steps of one machine"
        ),
    )
