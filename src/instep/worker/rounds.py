"""The rounds of averaging: a participant takes its local steps, and gives how far it came.

A participant is a unit of the job's, on whichever worker. It begins from the parameters,
buffers, optimizer and scheduler of the round's beginning, draws by keys of its own, and leaves
nothing behind: what it moved is put back. Its optimizer's state may be kept for its next round
(`local_optimizers.py`). How the participants' ways are averaged, the
strategy knows (`sync/rounds/averaging.py`); what the mean does is `RoundUpdate.apply`. Where the
members change within a round, those that stay keep what they have computed of it. A replica that is
a mesh computes a participant with all its ranks (`shared_steps.py`).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.data.batches import Batches
from instep.data.loader import Read, Skipped, Slice
from instep.data.order import key, micro_batch
from instep.data.participants import Sampling
from instep.errors import RecipeError, SpecError
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.recipe.rehearsal import called_backward
from instep.spec import JobSpec
from instep.sync.rounds.averaging import Averaging
from instep.worker.local_optimizers import LocalOptimizers
from instep.worker.shared_steps import MembersChanged, SharedSteps
from instep.worker.step.assignment import Finished, finished
from instep.worker.step.buffers import Buffers
from instep.worker.step.engine import Engine, Weighed
from instep.worker.step.passes import OF_PASS, Pass, Share
from instep.worker.step.update import OF_UPDATE, Update, options_of


class RoundUpdate(Update):
    """Moves parameters in local steps, and at the end of a round by the mean of all of them.

    Args:
        job: says what a round is, and after which step they begin.
        advances: whether the scheduler takes a step with each local step; else nobody but the
            user's code advances it.
        given: what `Update` takes.
    """

    def __init__(self, *given: Any, job: JobSpec, advances: bool = True, **named: Any) -> None:
        super().__init__(*given, **named)
        self._job, self._advances = job, advances
        self.slots = self.parameters
        """What this rank has of the parameters."""
        self.local: LocalOptimizers | None = None
        """The optimizer states of participants; None where they are not kept."""
        self.begin: list[Tensor] = []
        """The parameters of the round's beginning, while a participant takes its steps."""
        self.probe: Callable[[], Tensor | None] = lambda: None
        """What the model predicts where all participants do; None for nothing."""
        self.mu = 0.0
        """How strongly participants are drawn back to these."""

    @torch.no_grad()
    def apply(self, step: int) -> float | None:
        """End a round: take the agreed mean off the parameters of its beginning.

        The scheduler advances by the local steps of the round, as it did for each participant.
        Before the rounds, move by the agreed gradient, as where no participant has steps of its
        own; the state that the optimizer has then is what the first round begins with, if kept.
        """
        if step <= self._job.start_after:
            norm = super().apply(step)
            if step == self._job.start_after and not self._job.keeps_optimizers:
                self.optimizer.state = defaultdict(dict)
            return norm
        for slot in self.slots:
            if slot.grad is not None:
                slot.sub_(slot.grad)
        for _ in range(self._job.local_steps):
            self.advance()
        return None

    @torch.no_grad()
    def pull(self) -> bool:
        """Add the gradient of the proximal term to those that there are; whether there is one."""
        for slot, begin in zip(self.slots, self.begin, strict=True) if self.mu else ():
            grad, apart = slot.grad, slot - begin
            if grad is not None and grad.is_sparse:  # of the rows that it has
                grad = grad.coalesce()
                slot.grad = grad + self.mu * apart.sparse_mask(grad)
            elif grad is not None:
                grad.add_(apart, alpha=self.mu)
        return bool(self.mu)

    def take_step(self, *number: int) -> None:
        """A local step, by the `.grad` of this participant alone; `number` is what is keyed by.

        Raises:
            RecipeError: the optimizer keeps in its groups what it has learnt, and is to be kept.
        """
        set_generators(key(self._seed, OF_UPDATE, *number))
        self.clip()
        groups = self.optimizer.param_groups
        before = [options_of(group) for group in groups] if self.local is not None else []
        self.optimizer.step()
        self.drop_gradients()
        if before and before != [options_of(group) for group in groups]:
            raise RecipeError(
                f"the optimizer {type(self.optimizer).__name__} changes values of its param_groups "
                "in its step. They belong to all participants, so sync.options.local_optimizers = "
                "'kept' cannot keep them for one. Use 'reset', or another optimizer."
            )
        self.advance()

    def drop_gradients(self) -> None:
        """Of the local step."""
        for parameter in (*self.parameters, *self.slots):
            parameter.grad = None

    def advance(self) -> None:
        """The scheduler takes a local step; nothing else, if no sample counts in it."""
        if not self._advances:
            return
        with warnings.catch_warnings():  # of a worker that no participant has, or of its first
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\)")
            super().advance()


class Way(NamedTuple):
    """A participant that is computed: all that the round needs of it."""

    part: Pass
    participant: int
    """Its number, among all of the job."""
    total: float
    """Of its losses, as far as this rank computed them."""
    weight: float
    """What these are a mean of."""
    whole: float
    """What the losses of all ranks that compute it are a mean of."""
    size: float
    skipped: list[Skipped]
    moved: list[Tensor | None]
    """How far its parameters came, backwards; before the rounds, their gradients."""
    buffers: dict[int, Tensor]
    """That it moved, as `Buffers` numbers them."""
    predicted: Tensor | None
    """What it predicts where all do, if they do."""
    optimizer: dict[str, Tensor]
    """Its optimizer's state, as `LocalOptimizers` packs it; empty where it is not kept."""


class Participant:
    """A participant while its local steps are taken.

    All participants of a worker have the same parameters, optimizer and scheduler, one after
    the other. What one has moved is put back when the context is left.

    Args:
        update: has them.
        part: what the participant computes.
        number: the participant's, among all of the job.
        early: whether it gives its gradient, as all take the step together.
    """

    def __init__(
        self, update: RoundUpdate, part: Pass, number: int, *, early: bool = False
    ) -> None:
        self._update, self.part, self.number, self.early = update, part, number, early
        self.total = self.weight = self.whole = self.size = 0.0
        self.skipped: list[Skipped] = []
        optimizer, scheduler = update.optimizer, update.scheduler
        self.begin = update.begin = [slot.detach().clone() for slot in update.slots]
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None
        self._state = optimizer.state
        self._over = False
        optimizer.state = defaultdict(
            dict, {of: copy.deepcopy(kept) for of, kept in self._state.items()}
        )
        if update.local is not None and not early:
            update.local.resume(number)

    def way(self, buffers: Buffers) -> Way:
        """How far it has come, before what it moved is put back.

        Args:
            buffers: of the model. What it did to them is left for the engine to see.
        """
        local, slots = self._update.local, self._update.slots
        counted = self.total, self.weight, self.whole, self.size, self.skipped
        if self.early:
            gradients = [slot.grad for slot in slots]
            moved_by_pass = buffers.moved_by_pass()
            return Way(self.part, self.number, *counted, gradients, moved_by_pass, None, {})
        moved: list[Tensor | None] = [
            torch.sub(before, slot.detach()) for before, slot in zip(self.begin, slots, strict=True)
        ]
        optimizer = local.pack() if local is not None else {}
        predicted = self._update.probe()
        return Way(
            self.part, self.number, *counted, moved, buffers.moved_by_pass(), predicted, optimizer
        )

    def put_back(self) -> None:
        """All but the buffers is as at the round's beginning; a second call does nothing."""
        if self._over:
            return
        self._over, optimizer = True, self._update.optimizer
        with torch.no_grad():
            for slot, value in zip(self._update.slots, self.begin, strict=True):
                slot.copy_(value)
        self._update.drop_gradients()
        self._update.begin = []
        optimizer.state = self._state
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(kept)
        if self._schedule is not None:
            self._update.scheduler.load_state_dict(self._schedule)

    def __enter__(self) -> Participant:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


def local_steps_of(part: Pass, local_steps: int, least: int = 0) -> Iterator[tuple[int, Slice]]:
    """Number and samples of a participant's local steps; those without samples are left out.

    Where it has less than in a whole round, there are fewer steps than ones with `least` samples.
    """
    epoch, first, stop = part.samples
    if least:
        local_steps = min(local_steps, -(-part.size // least))
    for number in range(local_steps):
        low, high = micro_batch(first, stop, number, local_steps)
        if high > low:
            yield number, Slice(epoch, low, high)


def equip(engine: Engine, update: RoundUpdate, job: JobSpec) -> None:
    """Have participants do what the strategy wants of them: be drawn back to the round's
    beginning, and resume the optimizer states of their last rounds."""
    strategy: object = engine.strategy
    assert isinstance(strategy, Averaging), "participants are averaged"
    update.mu, strategy.start_after = strategy.pull, job.start_after
    if job.keeps_optimizers:
        stays = job.sync.own_state and job.mesh.ranks == 1
        strategy.kept = update.local = LocalOptimizers(update.optimizer, stays=stays)


def give(engine: Engine, update: RoundUpdate, way: Way) -> dict[int, Weighed]:
    """Have the engine take in how far a participant has come.

    Returns:
        What its losses came to, by its number; nothing where none of its samples counts.
    """
    part, whole = way.part, engine.where.stop - engine.where.first
    if update.local is not None and way.optimizer and not part.repeats:
        update.local.computed(way.participant, way.optimizer)
    if part.repeats or not way.whole:
        engine.skip_pass(part)
        return {}
    engine.begin_pass(part, way.whole / whole, last=False, unit=way.participant)
    for slot, moved in enumerate(way.moved):
        if moved is not None:
            engine.gradient(slot, moved)
    if way.predicted is not None and isinstance(engine.strategy, Averaging):
        engine.strategy.predicts(way.predicted)
    engine.end_pass(part, way.size / whole)
    return {part.number: Weighed(way.total, way.weight)}


class Rounds:
    """How one worker computes the participants that it was dealt.

    Args:
        engine, forward, update: the worker's; the engine's gradients come here.
        job: says how a round is cut.
        batches: what each commit takes.
        left: whether the members have changed meanwhile.
        at: told what is being done: `loading`, `forward` or `backward`.
        shared: how the ranks of this replica compute a local step, where they are several.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        update: RoundUpdate,
        job: JobSpec,
        batches: Batches,
        left: Callable[[], bool],
        at: Callable[[str], None],
        shared: SharedSteps | None = None,
    ) -> None:
        self._engine, self._forward, self._update = engine, forward, update
        self._shared, update.slots = shared, engine.slots
        self._job, self._seed, self._batches = job, job.seed, batches
        self._left, self._is_at = left, at
        self._participants, self._ranks = job.per_commit.micro_batches, job.mesh.ranks
        self._at = (0, 0)  # course and number of a round
        self._sampling = Sampling.of_job(job)
        self._numbers: list[int] = []  # of the participants in it
        self._ways: dict[int, Way] = {}  # of its participants, by number
        self._there: frozenset[Slice] = frozenset()
        """The samples of those that this generation need not compute: of its first round. They
        stay until it is over, as what is read may be asked for when that round is."""
        engine.take = self._keep
        equip(engine, update, job)
        if shared is not None:
            shared.pull = update.pull

    def _keep(self, slot: int, gradient: Tensor) -> None:
        """A gradient stays where the backward pass left it, for the local step."""
        self._update.slots[slot].grad = gradient

    def finished(self, comm: Comm, course: int, step: int) -> Finished:
        """What the members have computed of a round that an earlier generation began; all call it.

        Raises:
            PeerError: a member went away.
        """
        self._go_to(course, step)
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
            self._numbers = self._sampling.of(step)

    def slices(self, share: Share) -> Iterator[Slice]:
        """The samples of each local step of each participant that is to be computed, in order."""
        return (part.samples for part in self._parts(share))

    def _cuts(self, part: Pass) -> Iterator[tuple[int, Slice]]:
        """Its local steps; with data of its own they do not get smaller at the end of an epoch."""
        train, (epoch, first, _) = self._job.per_iteration, part.samples
        batch = train.global_batch // train.micro_batches if self._job.own_data else 0
        steps = 1 if self._batches.is_early(epoch, first) else self._job.local_steps
        return local_steps_of(part, steps, batch)

    def samples_of(self, share: Share) -> int:
        """How many samples of a round this worker computes, or has computed."""
        return sum(part.size for part in self._parts(share, every=True) if not part.repeats)

    def _parts(self, share: Share, *, every: bool = False) -> Iterator[Pass]:
        """What this rank has of each local step; of all participants, or of those to compute."""
        for part in share.passes:
            if every or part.samples not in self._there:
                for _, cut in self._cuts(part):
                    yield Pass(cut, 0) if self._shared is None else self._shared.part_of(cut)

    def run(
        self, share: Share, loads: Iterator[Read], step: int
    ) -> tuple[dict[int, Weighed], list[Skipped]]:
        """Compute this worker's participants of a round.

        Returns:
            What each one's losses came to, by its number, and the samples that could not be read.

        Raises:
            MembersChanged: everything is as at the begin of the round.
            PeerError: another rank of this replica was lost.
        """
        engine = self._engine
        self._go_to(engine.state.progress.course, step)
        losses: dict[int, Weighed] = {}
        skipped: list[Skipped] = []
        if isinstance(engine.strategy, Averaging):
            missing = [part for part in share.passes if part.samples not in self._there]
            engine.strategy.recall([self._numbers[part.number] for part in missing])
        for part in share.passes:
            if part.samples in self._there:
                way = self._ways[part.number]
                engine.buffers.move(way.buffers)
            else:
                way = self._ways[part.number] = self._way(part, loads, step)
            skipped += way.skipped
            losses |= give(engine, self._update, way)
        return losses, skipped

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
                if number in cuts and self._shared is not None:
                    counts = self._shared_step(participant, cuts[number], loads, step, number)
                elif number in cuts:
                    counts = self._local_step(participant, loads, step, number)
                if not counts:
                    self._update.advance()
            return participant.way(self._engine.buffers)

    def _shared_step(
        self, participant: Participant, cut: Slice, loads: Iterator[Read], step: int, number: int
    ) -> bool:
        """The same as `_local_step`, together with the other ranks of this replica."""
        assert self._shared is not None, "a mesh"
        place = step, participant.number, number
        self._is_at("forward")
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
        self._is_at("loading")
        read = next(loads)
        since = clock.lap(since, "load")
        participant.skipped += read.skipped
        participant.size += read.size
        if not read.size:
            return False
        self._is_at("forward")
        place = step, participant.number, number
        set_generators(key(self._seed, OF_PASS, *place))
        taken = engine.taken
        found = self._forward.loss(read.batch, read.size)
        if engine.taken != taken:
            raise called_backward()
        if found is None:
            return False
        participant.total += float(found.loss.detach()) * found.factor
        participant.weight += found.weight
        participant.whole += found.weight
        since = clock.lap(since, "forward")
        self._is_at("backward")
        found.loss.backward()
        if not participant.early:
            self._update.pull()
            self._update.take_step(*place)
        clock.lap(since, "backward")
        return True


def check_length(job: JobSpec, samples: int) -> None:
    """Refuse rounds that are longer than an epoch, or that never begin.

    Raises:
        SpecError: they are, or do not.
    """
    length = Batches.of_job(job, samples).length(job)
    if length <= job.start_after:
        raise SpecError(
            f"sync.options.start_after = {job.start_after}: the run has {length} steps, so no "
            f"round would begin. Set it to at most {length - 1}, or train longer."
        )
    if job.own_data:  # a participant's round ends with its epoch
        return
    batch = job.train.global_batch
    most = -(-samples // batch)
    if job.local_steps > most:
        raise SpecError(
            f"sync.options.local_steps = {job.local_steps}: the {samples} samples of an epoch are "
            f"{most} local steps of train.global_batch = {batch}, and a round does not go beyond "
            f"its epoch. Set sync.options.local_steps to at most {most}."
        )


def updates(job: JobSpec, commits: int) -> int:
    """Steps of an optimizer and its scheduler in so many commits."""
    return job.start_after + (commits - job.start_after) * job.local_steps


def verdict(job: JobSpec) -> str:
    """Whether a run gives the result of one machine, where participants take steps of their own."""
    sync = job.sync
    some = f"{sync.taking_part} of " if sync.taking_part < sync.participants else ""
    pulled = ", each drawn back to the round's beginning" if sync.name == "fedprox" else ""
    outer = ", and an optimizer takes a step of that" if sync.name in ("fedopt", "diloco") else ""
    own = f" with data of their own ({job.own_data!r})" if job.own_data else ""
    own += f", from step {job.start_after + 1} on," if job.start_after else ""
    return (
        f"no: sync.name = {sync.name!r} averages {some}{sync.participants} participants{own} after "
        f"{job.local_steps} local steps of each{pulled}{outer}. With sync.name = 'all_reduce' the "
        "run takes the steps of one machine"
    )
