"""Which checkpoints are kept: the last few, milestones, and the best in validation.

A checkpoint of a validated step has the metrics among its facts, so the choice survives a
restart: it is made from what is on disk. Nothing here knows models, deletes anything, or
imports torch. Way in: `best_rule` for a run, `metric_values` for a folder, `to_delete` once a
checkpoint has been published.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import CheckpointError, SpecError, near_miss
from instep.job.checkpoint import CheckpointSpec
from instep.state.files.manifest import published, read_manifest

METRICS = "metrics"
"""The fact that holds the metrics of a validation, those that are not finite left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The rule that chooses the best steps: how many, by which metric."""

    count: int
    metric: str = "loss"
    largest: bool = False
    """Whether a large value is a good one."""

    @classmethod
    def by(cls, spec: CheckpointSpec) -> Best:
        """The rule of a job's `[checkpoint]`."""
        mode = spec.best_mode
        largest = mode == "max" or (mode == "auto" and spec.best_metric != "loss")
        return cls(count=spec.keep_best, metric=spec.best_metric, largest=largest)

    def choose(self, values: Mapping[int, float]) -> list[int]:
        """The best of these steps, best first; of equals the earlier is better."""
        sign = -1 if self.largest else 1
        return sorted(values, key=lambda step: (sign * values[step], step))[: self.count]

    def value(self, facts: Mapping[str, Any]) -> float | None:
        """The metric among a checkpoint's facts, if it was measured."""
        metrics = facts.get(METRICS)
        found = metrics.get(self.metric) if isinstance(metrics, dict) else None
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def best_rule(spec: CheckpointSpec, metrics: Collection[str]) -> Best | None:
    """The rule by which a job keeps its best checkpoints, if it does.

    Args:
        spec: of the job.
        metrics: what a validation measures; empty where there is none.

    Raises:
        SpecError: the metric is not measured.
    """
    if not spec.keep_best:
        return None
    if not metrics:
        raise SpecError(
            f"checkpoint.keep_best = {spec.keep_best}: there is no validation that says which is "
            "best. Give the recipe `validate`, or leave the key out."
        )
    if spec.best_metric not in metrics:
        raise SpecError(
            f"checkpoint.best_metric = {spec.best_metric!r}: the validation does not measure it. "
            f"{near_miss(spec.best_metric, metrics)}"
        )
    return Best.by(spec)


def facts_of(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """The facts that a checkpoint keeps of a validation; empty where there was none."""
    if metrics is None:
        return {}
    return {METRICS: {name: value for name, value in metrics.items() if math.isfinite(value)}}


def metric_values(folder: Path, best: Best) -> dict[int, float]:
    """Step to metric, of every checkpoint in `folder` that has it and a valid manifest.

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


def to_delete(
    steps: Iterable[int],
    *,
    current: int,
    keep_last: int,
    keep_every: int = 0,
    keep_best: Collection[int] = (),
) -> list[int]:
    """The steps whose checkpoints may be deleted, now that the one of `current` is complete.

    A step beyond `current` is from before the run went back to an earlier
    checkpoint. It is deleted, or it would count as the newest.

    Args:
        steps: what is on disk, in any order.
        current: the step just published; never deleted.
        keep_last: how many of the newest to keep, `current` among them; at least 1.
        keep_every: above 0, its multiples are kept for good.
        keep_best: steps that are kept for good, such as those with the best metric.

    Returns:
        Ascending steps.
    """
    assert keep_last >= 1
    known = set(steps)
    kept = set(sorted(step for step in known | {current} if step <= current)[-keep_last:])
    kept.update(step for step in keep_best if step <= current)
    if keep_every:
        kept.update(step for step in known if step <= current and step % keep_every == 0)
    return sorted(known - kept)
