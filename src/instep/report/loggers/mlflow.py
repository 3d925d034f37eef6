"""MLflow. The environment says where to: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.

Without them it is `mlflow.db` in the run's folder. A resumed run continues the same run there: it
is found by a tag.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from instep.job.spec import JobSpec, as_table
from instep.report.figures.identity import flat
from instep.report.loggers.base import Point
from instep.store.folder import run_id

_TAG = "instep.run"
_MOST, _LONGEST = 1000, 500
"""What one call may have of metrics, and a parameter of characters."""

_ENDS = {"completed": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}


class MlflowLogger:
    """Writes metrics in batches; the job's settings are parameters."""

    package: ClassVar[str] = "mlflow"

    def __init__(self, run: Path, job: JobSpec) -> None:
        from mlflow.entities import Metric, Param, RunStatus
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.resolve()}/mlflow.db"
        self._client, self._metric, self._status = MlflowClient(where), Metric, RunStatus
        identity = run_id(run) or str(run.resolve())
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default")
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{identity}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, tags={_TAG: identity}, run_name=job.name)
        self._id = made.info.run_id
        texts = {name: value[:_LONGEST] for name, value in flat(as_table(job))}
        parameters = [Param(name, text) for name, text in texts.items()]
        for first in range(0, len(parameters), 100):
            self._client.log_batch(self._id, params=parameters[first : first + 100])

    def _experiment(self, name: str) -> str:
        there = self._client.get_experiment_by_name(name)
        return str(there.experiment_id if there else self._client.create_experiment(name))

    def write(self, points: Sequence[Point]) -> None:
        """In batches as large as a call allows."""
        for first in range(0, len(points), _MOST):
            some = points[first : first + _MOST]
            every = [self._metric(p.name, p.value, int(p.time * 1000), p.step) for p in some]
            self._client.log_batch(self._id, metrics=every)

    def flush(self) -> None:
        """Each call has written all."""

    def close(self, outcome: str) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id, _ENDS.get(outcome, "KILLED"))
