"""The rounds of averaging: participants take their local steps, and give how far they came.

A participant is a unit of the job's, on whichever worker. It begins from the parameters,
buffers, optimizer and scheduler of the round's beginning, draws by keys of its own, and leaves
nothing behind (`participant.py`). What it keeps for its next round is in `local_states.py`. How the
participants' ways are averaged, the strategy knows (`sync/rounds/averaging.py`); what the mean does
is `RoundUpdate.apply`. Where the
members change within a round, those that stay keep what they have computed of it. A replica that is
a mesh computes a participant with all its ranks (`shared_steps.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from instep.comm.base import Comm
from instep.data.batches import Batches
from instep.data.loader import Read, Skipped, Slice
from instep.data.order import Position, key
from instep.data.participants import Sampling
from instep.engine.assignment import Finished, finished
from instep.engine.engine import Engine
from instep.engine.passes import OF_PASS, Pass, Share
from instep.engine.step.agreement import Weighed
from instep.job.spec import JobSpec
from instep.privacy.secure.clipped import ClippedMean, Gift
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.recipe.rehearsal import called_backward
from instep.sync.rounds.streaming import Streaming
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute, Results
from instep.worker.passes.shared_steps import MembersChanged, SharedSteps
from instep.worker.rounds.local_models import LocalModel
from instep.worker.rounds.local_optimizers import LocalOptimizers
from instep.worker.rounds.local_parameters import LocalParameters
from instep.worker.rounds.local_states import (
    MODEL,
    OPTIMIZER,
    PARAMETERS,
    LocalStates,
    ParticipantPart,
)
from instep.worker.rounds.participant import Participant, Way, local_steps_of, refuse_buffers
from instep.worker.rounds.round_update import RoundUpdate, averaging
from instep.worker.rounds.summing import VOID, clipped_mean


def equip(
    engine: Engine, update: RoundUpdate, job: JobSpec, mean: ClippedMean | None = None
) -> ClippedMean | None:
    """Have participants do what the strategy wants of them: be drawn back to the round's
    beginning, and resume what they remember of their last rounds.

    Returns:
        Who sums what they give, where each is clipped.
    """
    strategy = averaging(engine.turn.strategy)
    update.mu, strategy.start_after = strategy.pull, job.start_after
    parts: dict[str, ParticipantPart] = {}
    if job.keeps_optimizers:
        parts[OPTIMIZER] = LocalOptimizers(update.optimizer)
    rounds = job.sync.rounds
    if rounds is not None and rounds.local_parameters:
        own = LocalParameters(engine.model, rounds.local_parameters, engine.parameters)
        parts[PARAMETERS] = own
        strategy.local = update.apart = own.slots
    clipped = None
    if isinstance(strategy, Streaming):
        strategy.participants = job.sync.participants
        parts[MODEL] = LocalModel(update.slots, strategy.agreed_since)
    elif rounds is not None and (mean is not None or rounds.clip):
        clipped = mean or clipped_mean(job, rounds.clip)
        strategy.sum_by(clipped, hidden=clipped.sealed or mean is not None)
    if parts:
        stays = job.sync.own_state and job.mesh.ranks == 1
        strategy.kept = update.local = LocalStates(parts, engine.device, stays=stays)
    return clipped


def give(engine: Engine, update: RoundUpdate, way: Way) -> dict[int, Weighed]:
    """Have the engine take in how far a participant has come.

    Returns:
        What its losses came to, by its number; nothing where none of its samples counts.
    """
    part, whole = way.part, engine.where.size
    if update.local is not None and way.remembers and not part.repeats:
        update.local.computed(way.participant, way.remembers)
    if part.repeats or not way.whole:
        engine.passes.skip(part)
        return {}
    engine.passes.begin(part, way.whole / whole, last=False, unit=way.participant)
    for slot, moved in enumerate(way.moved):
        if moved is not None:
            engine.passes.gradient(slot, moved)
    if way.predicted is not None:
        averaging(engine.turn.strategy).predicts(way.predicted)
    engine.passes.end(part, way.size / whole)
    return {part.number: Weighed(way.total, way.weight)}


class Rounds(Compute):
    """How one worker computes the participants that it was dealt.

    Args:
        engine, forward, update: the worker's; the engine's gradients come here.
        job: says how a round is cut.
        batches: what each commit takes.
        left: whether the members have changed meanwhile.
        activity: told what is being done.
        shared: how the ranks of this replica compute a local step, where they are several.
        mean: sums what participants give, in a way of its own, if there is one.
        warn: called with what a person is to know.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        update: RoundUpdate,
        job: JobSpec,
        batches: Batches,
        left: Callable[[], bool],
        activity: Activity,
        shared: SharedSteps | None = None,
        mean: ClippedMean | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._engine, self._forward, self._update = engine, forward, update
        self._shared, update.slots = shared, engine.turn.slots
        self._job, self._seed, self._batches = job, job.seed, batches
        self._left, self._activity, self._warn = left, activity, warn
        self._participants, self._ranks = job.per_commit.micro_batches, job.mesh.ranks
        self._at = (0, 0)  # course and number of a round
        self._who: Callable[[int], list[int]] = Sampling.of_job(job).of
        self._numbers: list[int] = []  # of the participants in it
        self._ways: dict[int, Way] = {}  # of its participants, by number
        self._there: frozenset[Slice] = frozenset()
        """The samples of those that this generation need not compute: of its first round. They
        stay until it is over, as what is read may be asked for when that round is."""
        self._clipped = equip(engine, update, job, mean)
        if shared is not None:
            shared.pull = update.pull

    def finished(self, comm: Comm) -> Finished:
        """Find what members have computed of a round that an earlier generation began; all call it.

        Raises:
            PeerError: a member went away.
        """
        progress = self._engine.state.progress
        step = progress.step + 1
        self._go_to(progress.course, step)
        table = torch.zeros(comm.size, self._participants, device=self._engine.parameters[0].device)
        table[comm.rank, list(self._ways)] = 1.0
        comm.all_reduce(table).wait()
        held = table.view(-1, self._ranks, self._participants).amin(1)  # by all of a replica
        self._ways = {n: way for n, way in self._ways.items() if held[comm.rank // self._ranks, n]}
        self._there = frozenset(way.part.samples for way in self._ways.values())
        rows = torch.zeros_like(table)
        rows[:: self._ranks] = held
        return finished(step, [row.nonzero().flatten().tolist() for row in rows])

    def _go_to(self, course: int, step: int) -> None:
        """What was computed for another round is of no use."""
        if self._at != (course, step):
            self._at, self._ways = (course, step), {}
            self._numbers = self._who(step)

    def slices(self, share: Share) -> Iterator[Slice]:
        """The samples of each local step of each participant that is to be computed, in order."""
        return (part.samples for part in self._parts(share))

    def _cuts(self, part: Pass) -> Iterator[tuple[int, Slice]]:
        """Its local steps; with data of its own they do not get smaller at the end of an epoch."""
        train, (epoch, first, _) = self._job.per_iteration, part.samples
        batch = train.global_batch // train.micro_batches if self._job.own_data else 0
        steps = 1 if self._batches.is_early(epoch, first) else self._job.local_steps
        return local_steps_of(part, steps, batch)

    def samples(self, share: Share) -> int:
        """How many samples of a round this worker computes, or has computed, and tells."""
        if self._shared is not None and not self._shared.tells:
            return 0  # another process has the same
        return sum(part.size for part in self._parts(share, every=True) if not part.repeats)

    def _parts(self, share: Share, *, every: bool = False) -> Iterator[Pass]:
        """What this rank has of each local step; of all participants, or of those to compute."""
        for part in share.passes:
            if every or part.samples not in self._there:
                for _, cut in self._cuts(part):
                    yield Pass(cut, 0) if self._shared is None else self._shared.part_of(cut)

    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Compute this worker's participants of a round, as `Compute.run` says.

        Raises:
            MembersChanged: everything is as at the begin of the round.
            PeerError: another rank of this replica was lost.
        """
        self._activity.enter("forward")
        engine, loads = self._engine, self._activity.loading(reads)
        self._go_to(engine.state.progress.course, step)
        losses: dict[int, Weighed] = {}
        skipped: list[Skipped] = []
        missing = [part for part in share.passes if part.samples not in self._there]
        averaging(engine.turn.strategy).recall([self._numbers[part.number] for part in missing])
        for part in share.passes:
            if part.samples in self._there:
                way = self._ways[part.number]
                engine.buffers.move(way.buffers)
            else:
                way = self._ways[part.number] = self._way(part, loads, step)
            skipped += way.skipped
            losses |= self._give(way)
        if self._clipped is not None:
            losses = self._of_all(self._clipped, [self._ways[p.number] for p in share.passes])
        return Results(losses, skipped)

    def _give(self, way: Way) -> dict[int, Weighed]:
        return give(self._engine, self._update, way)

    def _of_all(self, clipped: ClippedMean, ways: Sequence[Way]) -> dict[int, Weighed]:
        """Sum up the losses of all participants; nobody tells those of one.

        Raises:
            RecipeError: a participant moved buffers, and these would be told.
        """
        since = time.perf_counter()
        self._activity.enter("exchange")
        if clipped.sealed:
            refuse_buffers(ways, "sync.options.secure_sums")
        here = {w.participant: Gift(w.whole, w.total, w.size, w.moved) for w in ways}
        found = Weighed(*clipped.figures(here))
        if clipped.void:
            found = Weighed(math.nan, float(self._engine.where.size))
            self._warn(VOID.format(self._at[1]))
        self._engine.clock.lap(since, "wire")
        return {0: found} if self._engine.comm.rank == 0 else {}

    def _way(self, part: Pass, loads: Iterator[Read], step: int) -> Way:
        """Compute a participant; what it did to buffers is left for the engine to see."""
        early = step <= self._job.start_after
        with Participant(
            self._update, part, self._numbers[part.number], early=early
        ) as participant:
            cuts = dict(self._cuts(part))
            for number in range(1 if early else self._job.local_steps):
                counts = False
                if self._shared is None and self._left():
                    raise MembersChanged
                self._take_late(number)
                if number in cuts and self._shared is not None:
                    counts = self._shared_step(participant, cuts[number], loads, step, number)
                elif number in cuts:
                    counts = self._local_step(participant, loads, step, number)
                if not counts:
                    self._update.advance()
            self._take_late(self._job.local_steps)
            return participant.way(self._engine.buffers)

    @contextmanager
    def as_participant(self, number: int) -> Iterator[None]:
        """In this context the model has what is this participant's own, as of the last commit."""
        local = self._update.local
        if local is None or PARAMETERS not in local.parts:
            yield
            return
        own = local.parts[PARAMETERS]
        assert isinstance(own, LocalParameters), "as it is made"
        with own.lent(local.of(number, PARAMETERS)):
            yield

    def _take_late(self, number: int) -> None:
        """Before this local step, take up the fragment that was under way, if that is now.

        Raises:
            PeerError: a rank was lost.
        """
        strategy: object = self._engine.turn.strategy
        if not isinstance(strategy, Streaming) or number != strategy.delay or not number:
            return
        since = time.perf_counter()
        self._activity.enter("exchange")
        if (found := strategy.landed()) is not None:
            assert self._update.local is not None, "participants have models of their own"
            model = self._update.local.parts[MODEL]
            assert isinstance(model, LocalModel), "as it is made"
            model.take(*found, strategy.mixing)
        self._engine.clock.lap(since, "wire")

    def _shared_step(
        self, participant: Participant, cut: Slice, loads: Iterator[Read], step: int, number: int
    ) -> bool:
        """The same as `_local_step`, together with the other ranks of this replica."""
        assert self._shared is not None, "a mesh"
        place = step, participant.number, number
        self._activity.enter("forward")
        self._update.drop_gradients()
        given = self._shared.run(cut, loads, key(self._seed, OF_PASS, *place), left=self._left())
        participant.skipped += given.skipped
        participant.size += given.size
        participant.total += given.found.total
        participant.weight += given.found.weight
        participant.whole += given.whole
        if given.whole:
            self._update.known_norm = given.norm
            self._update.take_step(*place)
        return bool(given.whole)

    def _local_step(
        self, participant: Participant, loads: Iterator[Read], step: int, number: int
    ) -> bool:
        """Whether anything counted in it; else the optimizer has not moved."""
        engine, clock = self._engine, self._engine.clock
        since = time.perf_counter()
        self._activity.enter("loading")
        read = next(loads)
        since = clock.lap(since, "load")
        participant.skipped += read.skipped
        participant.size += read.size
        if not read.size:
            return False
        self._activity.enter("forward")
        place = step, participant.number, number
        set_generators(key(self._seed, OF_PASS, *place))
        taken = engine.passes.taken
        found = self._forward.loss(read.batch, read.size)
        if engine.passes.taken != taken:
            raise called_backward()
        if found is None:
            return False
        participant.count(float(found.loss.detach()) * found.factor, found.weight)
        since = clock.lap(since, "forward")
        self._activity.enter("backward")
        found.loss.backward()
        if not participant.early:
            self._update.pull()
            self._update.take_step(*place)
        clock.lap(since, "backward")
        return True
