"""Calls of the user's code that all processes make together, most of them between two steps.

Where a worker is lost in one, the others make it again with those that are there then; a
worker that takes another's place is answered from a log (`calls.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.protocol.messages import ON_REQUEST
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.sections import after
from instep.engine.state.committed import CommittedState
from instep.errors import PeerError, SpecError
from instep.worker.loop.after_commit import AfterCommit
from instep.worker.own import evaluation
from instep.worker.own.calls import EVALUATION, UserCall, UserCalls, Waits
from instep.worker.own.evaluation import NONE, EvaluationPiece, Round
from instep.worker.own.iteration import OwnStep
from instep.worker.passes.activity import Activity

_LOOK_S = 0.05
"""How often processes that cannot continue without a new worker look for one."""


class _PartsMissing(Exception):
    """Parts of an evaluation are: the worker that had them is lost, and not replaced yet."""


class SharedCalls:
    """Makes the calls, and knows which have been made since the last commit.

    Args:
        member, engine, activity: the worker's.
        ends: judges a validation, and ends the run after it.
        step: that the user's code is in.
        per_epoch: steps in an epoch.
        meet: leaves the group, because of an error or not, and returns in the next.
        too_early: said of a call in the middle of a step, behind its name.
    """

    round: Round | None = None
    """Batches of the evaluation that the user's code is in."""

    def __init__(
        self,
        member: Member,
        engine: Engine,
        activity: Activity,
        ends: AfterCommit,
        step: OwnStep,
        *,
        per_epoch: int,
        meet: Callable[[PeerError | None], None],
        too_early: str,
    ) -> None:
        self._member, self.engine, self._activity, self._ends = member, engine, activity, ends
        self._step, self._per_epoch, self._meet_again = step, per_epoch, meet
        self._device, self._too_early = engine.device, too_early
        self._evaluates_since: float | None = None
        self._calls = UserCalls()
        self._known_step: int | None = None  # the commit that the calls follow
        self._waits_in = Waits()

    @property
    def _state(self) -> CommittedState:
        return self.engine.state

    # ---- where the user's code is

    def regroup(self, comm: Comm) -> None:
        """Tell newcomers what the user's code did since the last commit; all members call it.

        Raises:
            SpecError: processes waited for each other in different calls.
            PeerError: a member went away meanwhile.
        """
        step = self._state.progress.step
        if self._known_step is not None and step != self._known_step:
            self._calls.commit(step, (step - 1) // self._per_epoch)
            self.enter(after(step))
        self._known_step = step
        if self._member.recovers:
            self._waits_in.compare(comm, self._device)
            self._calls.agree(comm, step, self._device)

    def enter(self, section: str) -> None:
        """Note that the user's code is in another section."""
        self._calls.enter(section)
        self.engine.turns[0].update.between.enter(section)

    def follow(self, step: int) -> None:
        """Note that what the user's code does from here on follows this commit."""
        epoch = (step - 1) // self._per_epoch
        self._calls.commit(step, epoch)
        self.engine.turns[0].update.between.commit(step, epoch)
        self._known_step = step
        self._waits_in.commit()

    # ---- the calls

    def sum(self, values: Sequence[float]) -> tuple[float, ...]:
        """Sum numbers over the processes: the same bits on each in whatever order."""
        rows = self.rows(f"session.sum of {len(values)} values", values)
        return tuple(_exact_sum(column) for column in zip(*rows, strict=True))

    def rows(self, name: str, values: Sequence[float]) -> list[list[float]]:
        """Gather as many numbers of each process, in the order of their ranks.

        Args:
            name: of the call, for errors.
            values: of this process.

        Raises:
            SpecError, PeerError: as for `_call`.
        """
        own = torch.tensor(values, dtype=torch.float64)

        def talk() -> list[list[float]]:
            every = evaluation.exchange(
                self.engine.comm, self._device, name, EvaluationPiece(0, [own])
            )
            return [piece.leaves[0].tolist() for piece in every]

        rows: list[list[float]] = self._call(name, talk, [own.tolist()])
        return rows

    def gather(self, tensors: Any) -> Any:
        """Gather the tensors of all processes, one behind the other in the dataset's order."""
        name, (leaves, form) = "session.gather_for_metrics", evaluation.flatten(tensors)
        now, number, expected = self.round, self.engine.comm.rank, None
        if now is not None:
            now.gathered, number, expected = True, now.number, now.expected
        elif self._step.now is not None and self._step.now.part.repeats:
            number = NONE

        def talk() -> list[Tensor]:
            piece = EvaluationPiece(number, leaves)
            every = evaluation.exchange(self.engine.comm, self._device, name, piece)
            if expected is not None and {*expected} - {each.number for each in every}:
                raise _PartsMissing
            return evaluation.joined(every)

        every = self._call(name, talk, [leaf.cpu() for leaf in leaves])
        return evaluation.build_again([leaf.to(self._device) for leaf in every], form)

    def begin_evaluation(self) -> tuple[int, int]:
        """Begin an evaluation; returns how many parts it has, and which is this process's."""
        if self._step.now is not None and self._member.recovers:
            raise self._within("an evaluation")

        def talk() -> int:
            comm, nothing = self.engine.comm, EvaluationPiece(0, [])
            return len(evaluation.exchange(comm, self._device, EVALUATION, nothing))

        self._evaluates_since = time.perf_counter()
        parts = int(self._call(EVALUATION, talk, 1))
        return parts, self._calls.take_part(self.engine.comm.rank)

    def validated(self, samples: int, metrics: dict[str, float]) -> None:
        """Write down what a validation by the user gave, once, and judge it."""
        since, self._evaluates_since = self._evaluates_since, None
        took = time.perf_counter() - since if since is not None else 0.0
        if self._step.now is not None and self._member.recovers:
            raise self._within("session.validated")
        state = self._state
        step = self.engine.step if self._step.now is not None else state.progress.step

        def talk() -> list[bool]:
            comm = self.engine.comm
            if comm.rank == 0:
                self._member.emit(
                    "validated",
                    step=step,
                    epoch=max(0, step - 1) // self._per_epoch,
                    metrics=metrics,
                    samples=samples,
                    seconds=took,
                    scheduled=not state.over,
                )
            told = not state.over and self._ends.stopping.after_validation(step, metrics)
            if self._member.recovers:  # a later worker is not to tell it again
                evaluation.exchange(comm, self._device, "session.validated", EvaluationPiece(0, []))
            return [told]

        (told,) = self._call("session.validated", talk, [False])
        if told and not state.over:
            self._ends.end_by(ON_REQUEST)
            state.end()

    # ---- how a call is made

    def _call(self, name: str, talk: Callable[[], Any], own: Any) -> Any:
        """Return what a call of the user's code that talks gives.

        Args:
            name: for errors.
            talk: with the others, in the present group.
            own: what it gives where the iteration is void, and will come again.

        Raises:
            SpecError: it cannot be made here.
            PeerError: another worker is lost, and nobody can take its place.
        """
        if self._step.now is not None:
            return self._call_within(name, talk, own)
        while True:
            known = self._calls.answered(name)
            if known is not None:
                return known.result
            try:
                with self.together(name):
                    result = talk()
            except PeerError as error:
                if not self._member.recovers:
                    raise
                self._meet_again(error)
            except _PartsMissing:
                self._wait_for_newcomer()
            else:
                if self._member.recovers:
                    self._calls.add(UserCall(name, result))
                return result

    def _call_within(self, name: str, talk: Callable[[], Any], own: Any) -> Any:
        """Make a call in an iteration: it comes again with the iteration, so nothing is kept."""
        step = self._step
        if not step.iteration(name).last:
            raise SpecError(f"{name} {self._too_early.format(step=self.engine.step)}")
        if self._member.recovers and step.committed is not None:
            raise self._within(name)
        if step.apart is not None:
            return own
        try:
            with self.together(name):
                return talk()
        except PeerError as error:
            if not self._member.recovers:
                raise
            step.breaks(error)
            return own

    def _within(self, name: str) -> SpecError:
        when = "after its step was committed"
        if self._step.committed is None:
            when = "whose step is not committed (a loop that `break` has left is still in it)"
        return SpecError(
            f"{name} was called within an iteration, {when}: under instep run a worker that takes "
            "another's place does not come by there. Call it before optimizer.step(), or after "
            "the loop over the loader has come to its end."
        )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Note in this context that all processes are in the same place; if not, they wait in vain.

        Args:
            what: they do there.
        """
        self._activity.enter("exchange")
        try:
            with self._waits_in.call(what, self._state.progress.step):
                yield
        finally:
            self._activity.enter("your loop")

    def _wait_for_newcomer(self) -> None:
        """Wait until the master has one, who takes the part of an evaluation that was lost."""
        comes = torch.zeros(1, device=self._device)
        self._activity.enter("exchange")
        try:
            while not comes.item():
                time.sleep(_LOOK_S)
                comes.fill_(float(self._member.regroups))
                self.engine.comm.all_reduce(comes).wait()
        except PeerError as error:
            self._meet_again(error)
        else:
            self._meet_again(None)


def _exact_sum(values: Sequence[float]) -> float:
    """Sum, and round once: the same in any order."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities
        return sum(values)
