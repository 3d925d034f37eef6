"""Which checkpoints did best in validation, as their own manifests say.

A checkpoint of a step that was validated has the figures among its facts, so
the choice survives a restart: it is made from what is on disk. It knows
nothing of models, and imports no torch. Way in: `best_of` for a run,
`measured` for a folder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import CheckpointError, SpecError, near_miss
from instep.spec import CheckpointSpec
from instep.state.manifest import published, read_manifest

METRICS = "metrics"
"""The fact that holds the figures of a validation; those that are no finite number left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """So many, by this metric."""

    count: int
    metric: str = "loss"
    largest: bool = False
    """Whether a large value is a good one."""

    @classmethod
    def by(cls, spec: CheckpointSpec) -> Best:
        """What a job's `[checkpoint]` says is best."""
        mode = spec.best_mode
        largest = mode == "max" or (mode == "auto" and spec.best_metric != "loss")
        return cls(count=spec.keep_best, metric=spec.best_metric, largest=largest)

    def choose(self, values: Mapping[int, float]) -> list[int]:
        """The best of these steps, best first; of equals the earlier is the better."""
        sign = -1 if self.largest else 1
        return sorted(values, key=lambda step: (sign * values[step], step))[: self.count]

    def value(self, facts: Mapping[str, Any]) -> float | None:
        """The metric among a checkpoint's facts, if it was measured."""
        metrics = facts.get(METRICS)
        found = metrics.get(self.metric) if isinstance(metrics, dict) else None
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def best_of(spec: CheckpointSpec, metrics: Collection[str]) -> Best | None:
    """The rule by which a job keeps its best checkpoints, if it does.

    Args:
        spec: of the job.
        metrics: what a validation measures; empty where there is none.

    Raises:
        SpecError: there is nothing to tell the best by.
    """
    if not spec.keep_best:
        return None
    if not metrics:
        raise SpecError(
            f"checkpoint.keep_best = {spec.keep_best}: there is no validation to tell the best "
            "by. Give the recipe `validate`, or leave the key out."
        )
    if spec.best_metric not in metrics:
        raise SpecError(
            f"checkpoint.best_metric = {spec.best_metric!r}: the validation does not measure it. "
            f"{near_miss(spec.best_metric, metrics)}"
        )
    return Best.by(spec)


def facts_of(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """The fact that a checkpoint keeps of a validation; empty where there was none."""
    if metrics is None:
        return {}
    return {METRICS: {name: value for name, value in metrics.items() if math.isfinite(value)}}


def measured(folder: Path, best: Best) -> dict[int, float]:
    """Step to metric of every checkpoint in `folder` that has it and a sound manifest.

    Raises:
        CheckpointError: `folder` is there but cannot be listed.
    """
    found: dict[int, float] = {}
    for step, checkpoint in published(folder):
        try:
            value = best.value(read_manifest(checkpoint).facts)
        except CheckpointError:
            continue
        if value is not None:
            found.setdefault(step, value)
    return found
