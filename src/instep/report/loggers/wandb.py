"""Weights & Biases. The environment says where to: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY.

The run's own folder has what the library writes, also in offline mode. A resumed run continues the
same run there, by the run's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from instep.job.spec import JobSpec, as_table
from instep.report.figures.identity import flat
from instep.report.loggers.base import Point
from instep.store.folder import run_id


class WandbLogger:
    """Logs over the axis `step`: W&B's own count of calls cannot go back."""

    package: ClassVar[str] = "wandb"

    def __init__(self, run: Path, job: JobSpec) -> None:
        import wandb

        identity = run_id(run)[:32] or None
        self._run = wandb.init(
            dir=run,
            name=job.name,
            id=identity,
            resume="allow" if identity else None,
            config=dict(flat(as_table(job))),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[Point]) -> None:
        """One call for neighbouring points of a step."""
        for step, same in groupby(points, key=lambda point: point.step):
            self._run.log({"step": step} | {point.name: point.value for point in same})

    def flush(self) -> None:
        """The library does that by itself."""

    def close(self, outcome: str) -> None:
        """Finish the run there; one that failed is marked so."""
        self._run.finish(exit_code=int(outcome == "failed"))
