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

import torch
from torch import Tensor

from instep.data.loader import Read, Slice
from instep.data.order import Position, key
from instep.engine.passes import OF_PASS, Pass, Share, parts_of, share_of
from instep.engine.update import Update
from instep.errors import PeerError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.build import set_generators
from instep.worker.own.backward import Backward
from instep.worker.own.iteration import Batch, Iteration
from instep.worker.own.loop import OwnLoop
from instep.worker.own.optimizer_calls import OptimizerCalls
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


class LocalBackward(Backward):
    """Leaves the gradients of a local step where its backward pass left them."""

    def _receive(self, now: Iteration, slot: int, gradient: Tensor) -> None:
        now.begun = True
        self._engine.parameters[slot].grad = gradient

    def end(self, now: Iteration) -> None:
        """End the pass of an iteration, which the engine has not seen."""
        now.computed = True


class LocalCalls(OptimizerCalls):
    """Answers the calls of the user's code, where each `optimizer.step()` is a local step."""

    _update: RoundUpdate
    _participant: Participant | None = None
    _local: _LocalStep | None = None
    moved = False
    """Whether a participant has moved in this round."""

    def begin_round(self) -> None:
        """Get ready for the local steps of another round."""
        self.moved = False

    def enter(self, participant: Participant, local: _LocalStep) -> None:
        """Let this local step come next, after those before it that had no sample."""
        self._participant, self._local = participant, local
        with self._step.directly():
            for _ in range(local.empty):
                self._update.advance()

    def exchange(self) -> None:
        """Wait: the round ends in `optimizer.step()`, as this participant is to move before."""

    def optimizer_step(self, move: Callable[[], Any]) -> None:
        """Take `optimizer.step()`: a local step, which may end the round."""
        if self._step.direct:
            move()
            return
        now = self._take_in_step()
        if now is None or not now.stepped:
            return
        self._guard.check_trained()
        self._guard.check_zeros(self._engine.step)
        participant, local = self._participant, self._local
        assert participant is not None
        assert local is not None
        self.moved = True
        with self._step.directly():
            if now.weight or now.part.repeats:
                self._update.pull()
                self._update.take_step(self._engine.step, local.part.number, local.number)
            else:
                self._update.advance()
        participant.count(now.total, now.weight, now.samples)
        try:
            if local.ends:
                self._end_participant(participant)
            if now.last:
                self.end_round()
        except PeerError as error:
            self._step.breaks(error)

    def _end_participant(self, participant: Participant) -> None:
        """Give the engine how far a participant came, whose local steps are done."""
        way = participant.way(self._engine.buffers)
        participant.put_back()
        self._step.losses.update(give(self._engine, self._update, way))

    def end_round(self) -> None:
        """Commit the mean of all participants.

        Raises:
            PeerError: a worker was lost.
        """
        self._agree()
        with self._step.directly():
            self._step.commit(self._engine.commit())
        self._shared.follow(self.state.progress.step)

    def scheduler_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take `scheduler.step()`: between two rounds."""
        if self._step.now is not None and not self._step.direct and not self._advances:
            raise SpecError(
                "scheduler.step() was called in an iteration: with sync.name = "
                f"{self._engine.member.job.sync.name!r} each process takes steps of its own, and "
                "all have the rates of the round's beginning. Give the scheduler as "
                "prepare(scheduler=...), which advances it with every local step, and leave the "
                "call out; or call it after the loop over the loader."
            )
        return super().scheduler_step(original, *args, **kwargs)


class OwnLoopRounds(OwnLoop):
    """What stands behind loader, optimizer and scheduler where participants are averaged.

    Raises:
        SpecError: the job asks for what cannot be had here.
    """

    _update: RoundUpdate
    compute: LocalSteps
    calls: LocalCalls
    _each_moves = True
    _backward_of = LocalBackward
    _calls_of = LocalCalls

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.compute = LocalSteps(self.job.local_steps)

    def _equip(self, scaler: torch.amp.GradScaler | None) -> None:
        super()._equip(scaler)
        if scaler is not None and scaler.is_enabled():
            raise SpecError(
                f"sync.name = {self.job.sync.name!r} does not go with a GradScaler: participants "
                "take steps of their own, and each would come to a scale of its own. Use bfloat16."
            )
        check_length(self.job, self.samples)
        equip(self.engine, self._update, self.job)

    def _make_update(self, job: JobSpec) -> Callable[..., Update]:
        return partial(RoundUpdate, job=job, advances=self._advances)

    @property
    def _too_early(self) -> str:
        return (
            "was called in the middle of round {step} (a loop that `break` has left is still in "
            f"it): with sync.name = {self.job.sync.name!r} each process takes local steps of its "
            "own, and some may have fewer. Let the loop over the loader come to its end, or leave "
            "it after the last step of a round, and call it then."
        )

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
        self.calls.begin_round()
        parts = self._parts(where, share)
        for place, part in enumerate(parts):
            with Participant(self._update, part, part.number) as participant:
                last = place == len(parts) - 1
                yield from self._local_steps(participant, part, loads, last=last)
        if not self.present.exchanged:  # no sample of the last participant could be read
            self.calls.end_round()
        return Results(self.present.losses, self.present.skipped)

    def _local_steps(
        self, participant: Participant, part: Pass, loads: Iterator[Read], *, last: bool
    ) -> Iterator[Batch]:
        if part.repeats:
            loads = self._loader.read((samples for _, samples in self.compute.cuts(part)), None)
        for local in self._readable_steps(part, loads):
            if self.member.superseded:
                raise PeerError("the members have changed in the middle of a round.")
            self.calls.enter(participant, local)
            ends = last and local.ends
            now = self.present.enter(Iteration(part, local.read.size, last=ends))
            set_generators(key(self.job.seed, OF_PASS, self.step, part.number, local.number))
            since = time.perf_counter()
            yield Batch(local.read.batch)
            self.present.leave()
            self._refuse_half_done(now)
            self.engine.clock.lap(since, "forward")

    def _readable_steps(self, part: Pass, loads: Iterator[Read]) -> Iterator[_LocalStep]:
        """The local steps that have samples; which is the last, is known."""
        found: _LocalStep | None = None
        for number, _ in self.compute.cuts(part):
            read = next(loads)
            if not part.repeats:
                self.present.skipped.extend(read.skipped)
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

    @property
    def _begun(self) -> bool:
        return self.present.committed is None and (self.calls.moved or super()._begun)
