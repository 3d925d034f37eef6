"""Averaging in the user's own loop: each iteration is a local step of this process's participant.

There are as many participants as processes. Each `optimizer.step()` moves the parameters at once,
by the gradient of this process alone. The last one of a round also ends it: the processes
average how far they came, and commit. Where a worker is lost, another takes over its participant
until a new worker is there: that process's loop then sees the batches of both, one
participant after the other, each from the beginning of the round. What a participant is, and
how it is averaged, is in `worker/rounds/participant.py` and `worker/rounds/rounds.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from instep.data.loader import Read, Slice
from instep.data.order import Position, key
from instep.engine.passes import OF_PASS, Pass, Share, parts_of, share_of
from instep.engine.update import Update
from instep.errors import PeerError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.build import set_generators
from instep.worker.own.iteration import Batch, Iteration
from instep.worker.own.loop import OwnLoop
from instep.worker.passes.base import Dealt, Results
from instep.worker.rounds.participant import Participant, local_steps_of
from instep.worker.rounds.round_checks import check_length, verdict
from instep.worker.rounds.round_update import RoundUpdate
from instep.worker.rounds.rounds import equip, give


class _LocalStep(NamedTuple):
    part: Pass
    number: int
    """Among those of the participant."""
    empty: int
    """How many local steps before it had no sample that could be read."""
    read: Read
    ends: bool
    """Whether it is the participant's last."""


class LocalSteps(Dealt):
    """The local steps of participants, which are read in their order.

    Args:
        count: of each participant in a round.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def cuts(self, part: Pass) -> Iterator[tuple[int, Slice]]:
        """The local steps of a participant, by number."""
        return local_steps_of(part, self._count)

    def slices(self, share: Share) -> Iterator[Slice]:
        """Slices to read, as `Dealt.slices` says."""
        return (samples for part in share.passes for _, samples in self.cuts(part))


class OwnRounds(OwnLoop):
    """What stands behind loader, optimizer and scheduler where participants are averaged.

    Raises:
        SpecError: the job asks for what cannot be had here.
    """

    _update: RoundUpdate
    compute: LocalSteps

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        job = self.job
        if self.scaler is not None and self.scaler.is_enabled():
            raise SpecError(
                f"sync.name = {job.sync.name!r} does not go with a GradScaler: participants take "
                "steps of their own, and each would come to a scale of its own. Use bfloat16."
            )
        self.compute = LocalSteps(job.local_steps)
        check_length(job, self.samples)
        equip(self.engine, self._update, job)
        self._participant: Participant | None = None
        self._local: _LocalStep | None = None
        self._moved = False  # in this round

    def _make_update(self, job: JobSpec) -> Callable[..., Update]:
        return partial(RoundUpdate, job=job, advances=self._advances)

    def _verdict(self) -> str:
        return verdict(self.job)

    # ---- the loader

    @property
    def _merge(self) -> bool:
        """Each participant has a pass of its own."""
        return False

    def length(self) -> int:
        """Batches that this worker has in a whole epoch."""
        rounds = self.engine.assignment.plan(1, self._per_epoch, merge=False)
        parts = (part for each in rounds for part in self._parts(*each))
        return sum(len(list(self.compute.cuts(part))) for part in parts)

    def _parts(self, where: Position, share: Share) -> list[Pass]:
        """This process's participants of a round; one that counts nothing where it has none.

        So every process's loop runs in every round, and does what the user wrote in it.
        """
        if share.passes:
            return share.passes
        every = share_of(where, parts_of(where, self.job.per_commit), 1, 0, merge=False).passes
        return [every[0]._replace(repeats=True)]

    def _passes(
        self, where: Position, share: Share, loads: Iterator[Read]
    ) -> Generator[Batch, None, Results]:
        self._begin(share)
        self._moved = False
        parts = self._parts(where, share)
        for place, part in enumerate(parts):
            participant = self._participant = Participant(self._update, part, part.number)
            with participant:
                yield from self._local_steps(part, loads, last=place == len(parts) - 1)
        if not self._exchanged:  # no sample of the last participant could be read
            self._end_round()
        return Results(self._losses, self._skipped)

    def _local_steps(self, part: Pass, loads: Iterator[Read], *, last: bool) -> Iterator[Batch]:
        if part.repeats:
            loads = self._loader.read((samples for _, samples in self.compute.cuts(part)), None)
        for local in self._readable_steps(part, loads):
            if self.member.superseded:
                raise PeerError("the members have changed in the middle of a round.")
            self._local = local
            with self._directly():
                for _ in range(local.empty):
                    self._update.advance()
            now = self._now = Iteration(part, local.read.size, last=last and local.ends)
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number, local.number))
            since = time.perf_counter()
            yield Batch(local.read.batch)
            self._now = None
            self._raise_apart()
            self._refuse_half_done(now)
            self.engine.clock.lap(since, "forward")

    def _readable_steps(self, part: Pass, loads: Iterator[Read]) -> Iterator[_LocalStep]:
        """The local steps that have samples; which is the last, is known."""
        found: _LocalStep | None = None
        for number, _ in self.compute.cuts(part):
            read = next(loads)
            if not part.repeats:
                self._skipped += read.skipped
            if not read.size:
                continue
            if found is not None:
                yield found
            empty = number - 1 - (found.number if found is not None else -1)
            found = _LocalStep(part, number, empty, read, ends=False)
        if found is not None:
            yield found._replace(ends=True)

    def _refuse_half_done(self, now: Iteration) -> None:
        if not now.begun:
            super()._refuse_half_done(now)
        if not now.stepped:
            raise SpecError(
                f"round {self.step}: optimizer.step() was not called for a batch. With sync.name = "
                f"{self.job.sync.name!r} each batch is a local step: call it in every iteration."
            )

    # ---- a local step

    def _receive(self, now: Iteration, slot: int, gradient: Tensor) -> None:
        """It stays where the backward pass left it."""
        now.begun = True
        self.engine.parameters[slot].grad = gradient

    def _end_pass(self, now: Iteration) -> None:
        now.computed = True

    def _exchange_now(self) -> None:
        """The round ends in `optimizer.step()`: this participant is to move before."""

    def optimizer_step(self, move: Callable[[], Any]) -> None:
        """The user's `optimizer.step()`: a local step, which may end the round."""
        if self._direct:
            move()
            return
        now = self._take_in_step()
        if now is None or not now.stepped:
            return
        self._guard.check_trained()
        self._guard.check_zeros(self.step)
        participant, local = self._participant, self._local
        assert participant is not None
        assert local is not None
        self._moved = True
        with self._directly():
            if now.weight or now.part.repeats:
                self._update.pull()
                self._update.take_step(self.step, local.part.number, local.number)
            else:
                self._update.advance()
        participant.total += now.total
        participant.weight += now.weight
        participant.whole += now.weight
        participant.size += now.samples
        try:
            if local.ends:
                self._end_participant(participant)
            if now.last:
                self._end_round()
        except PeerError as error:
            self._apart, self._agreed = error, None
        self.phase = "your loop"

    def _end_participant(self, participant: Participant) -> None:
        """Its local steps are done: the engine is given how far it came."""
        way = participant.way(self.engine.buffers)
        participant.put_back()
        self._losses |= give(self.engine, self._update, way)

    def _end_round(self) -> None:
        """The mean of all participants is what the round comes to."""
        self._agree_on_step()
        with self._directly():
            self._committed = self.engine.commit()
        self._follow(self._committed.step)

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer moves in this iteration: in each one."""
        return self._now is not None

    @property
    def _begun(self) -> bool:
        return self._committed is None and (self._moved or super()._begun)

    # ---- what else the user calls

    def scheduler_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's `scheduler.step()`: between two rounds."""
        if self._now is not None and not self._direct and not self._advances:
            raise SpecError(
                "scheduler.step() was called in an iteration: with sync.name = "
                f"{self.job.sync.name!r} each process takes steps of its own, and all have the "
                "rates of the round's beginning. Give the scheduler as prepare(scheduler=...), "
                "which advances it with every local step, and leave the call out; or call it "
                "after the loop over the loader."
            )
        return super().scheduler_step(original, *args, **kwargs)

    def _call_within(self, name: str, talk: Callable[[], Any], own: Any) -> Any:
        if self._now is not None and not self._now.last:
            raise SpecError(
                f"{name} was called in the middle of round {self.step} (a loop that `break` has "
                f"left is still in it): with sync.name = {self.job.sync.name!r} each process takes "
                "local steps of its own, and some may have fewer. Let the loop over the loader "
                "come to its end, or leave it after the last step of a round, and call it then."
            )
        return super()._call_within(name, talk, own)
