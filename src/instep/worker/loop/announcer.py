"""Announcements of one worker to people, beside its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from instep.comm.base import Comm
from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.state.committed import Commit
from instep.worker.rounds.after_round import report_lost, report_spread, spread_of


class Announcer:
    """Writes events of one worker into the log.

    Args:
        member, engine: the worker's.
    """

    def __init__(self, member: Member, engine: Engine) -> None:
        self._member, self._engine = member, engine
        self._warned = set[str]()

    def warn(self, text: str) -> None:
        """Write a warning, once, by one worker."""
        if self._engine.comm.rank == 0 and text not in self._warned:
            self._warned.add(text)
            self._member.emit("warning", text=f"{text}.")

    def warn_of_loss(self, step: int, loss: float) -> None:
        """Warn of a loss that is no finite number, the first time."""
        if not math.isfinite(loss) and "loss" not in self._warned:
            self._warned.add("loss")
            self.warn(f"the loss at step {step} is {loss}; training continues")

    def commit(self, done: Commit, column: Comm, *, warns: bool) -> None:
        """Tell what is known of a step once it is committed.

        Args:
            done: the commit.
            column: the ranks that have this one's place in their replicas.
            warns: whether a loss that is not finite does not end the run.
        """
        strategy = self._engine.turn.strategy
        if self._engine.comm.rank == 0:
            report_spread(self._member, spread_of(strategy), done.step)
        report_lost(self._member, self._member.job, strategy, tells=column.rank == 0)
        if warns:
            self.warn_of_loss(done.step, done.loss)

    def ready(
        self, loader: Loader, batches: Batches, validation_samples: int, last_step: int | None
    ) -> None:
        """Tell that the worker is about to take its first step, and with what.

        Args:
            loader: of the training dataset.
            batches: what each commit takes of it.
            validation_samples: in the other dataset.
            last_step: of the job; None if the user's loop decides.
        """
        tables, sizes = self._engine.tables, batches.sizes
        own = sum(parameter.numel() for parameter in self._engine.parameters)
        self._member.emit(
            "worker_ready",
            worker=self._member.number,
            device=str(self._engine.device),
            threads=torch.get_num_threads(),
            parameters=own + (tables.numbers if tables is not None else 0),
            samples=batches.samples,
            epoch_steps=sizes.steps if sizes is not None else None,
            epochs_vary=sizes is not None and sizes.total is None,
            last_step=last_step,
            loader=f"{loader.mode}: {loader.why}",
            phases=self._member.phases,
            validation_samples=validation_samples,
        )


def tells_trial(member: Member) -> Callable[[int, int], None]:
    """Make what tells how far a trial is: at its beginning, and from then on once in a second."""
    said = -math.inf

    def say(done: int, of: int) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= 1:
            said = now
            member.emit("trial_progress", worker=member.number, done=done, of=of)

    return say
