"""One validation: all workers compute their share of it, and the first one tells what was found."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.skipping import SkipReporter
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute
from instep.worker.passes.evaluate import Sharing, evaluate
from instep.worker.replica.replica import Replica
from instep.worker.rounds.rounds import Rounds
from instep.worker.training.inputs import Inputs


class Validation:
    """The validations of a run.

    Args:
        inputs: of the worker.
        engine: in whose groups it agrees with the others.
        activity: told what is being done.
        compute: how passes are computed; rounds validate each participant's model.
        skips: told what could not be read.
        replica: of this process, if it is a mesh.
        sizes: samples of each participant, where they have validation sets of their own.
    """

    def __init__(
        self,
        inputs: Inputs,
        engine: Engine,
        activity: Activity,
        compute: Compute,
        skips: SkipReporter,
        replica: Replica | None,
        sizes: Sequence[int],
    ) -> None:
        self._inputs, self._engine, self._activity = inputs, engine, activity
        self._skips, self._replica = skips, replica
        self._sizes = sizes
        self._as_participant = compute.as_participant if isinstance(compute, Rounds) else None

    def run(self, where: Position, step: int, *, scheduled: bool) -> dict[str, float] | None:
        """Compute mean loss and metrics; all workers call it after the same step.

        Args:
            where: in the epoch.
            step: that has been committed.
            scheduled: whether the job wants a validation here, and not a person.

        Returns:
            By name; None if there is nothing to validate on.
        """
        inputs, replica = self._inputs, self._replica
        if inputs.validate is None:
            return None
        self._activity.enter("validation")
        inputs.forward.take_turn(-1)
        begin, count = time.perf_counter(), inputs.validation_samples
        assignment, comm, mesh = self._engine.assignment, self._engine.comm, inputs.job.mesh
        with self._engine.state.averaged(), self._engine.reading():
            found = evaluate(
                inputs.forward,
                inputs.validate,
                count,
                inputs.job.train.validation_batch,
                comm,
                Sharing(
                    assignment.dealing.speeds,
                    mesh.batches_of(len(assignment.workers)),
                    mesh.batch_of(comm.rank),
                    tells=replica is None or replica.tells,
                    lockstep=replica is not None,
                ),
                arrived=partial(self._activity.enter, "exchange"),
                sizes=self._sizes,
                as_participant=self._as_participant,
            )
        self._skips.report(found.skipped, dataset="validation", step=step, epoch=where.epoch)
        if comm.rank == 0:
            emit = inputs.member.emit
            emit(
                "validated",
                step=step,
                epoch=where.epoch,
                metrics=found.metrics,
                samples=found.samples,
                skipped=count - found.samples,
                seconds=time.perf_counter() - begin,
                scheduled=scheduled,
            )
            if found.participants:
                emit("participants_validated", step=step, metrics=_as_json(found.participants))
        return found.metrics


def _as_json(metrics: dict[str, list[float]]) -> dict[str, list[float | None]]:
    """Metrics of participants, without numbers that JSON does not have."""
    return {
        name: [value if math.isfinite(value) else None for value in values]
        for name, values in metrics.items()
    }
