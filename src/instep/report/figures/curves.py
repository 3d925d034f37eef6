"""Curves of a run, thinned so that a page stays small for any length of run.

Each curve carries four x axes: the step, the samples used, the seconds of the run by then,
and the bytes that all workers had sent. If several points share a bucket, their mean, lowest and
highest are kept; values that are not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from instep.report.figures.summary import loss_per_step
from instep.store.run_folder import Floats, Records, RunFolder, step_ends

POINTS = 400
"""Most points of one curve."""

_STRIP_POINTS = 160
_DIGITS = 6  # significant; a pixel is coarser

Curve = dict[str, list[float | None]]


def charts(runs: list[RunFolder]) -> list[dict[str, Any]]:
    """What the page draws: one chart for each quantity, in it the lines of every run.

    `loss` first, training and validation together; then each validation metric.
    """
    names = dict.fromkeys(["loss"])
    for folder in runs:
        for event in folder.validations:
            names.update(dict.fromkeys(event.get("metrics") or {}))
    found = []
    for name in names:
        lines = []
        for number, folder in enumerate(runs):
            if name == "loss" and len(folder.steps):
                lines.append({"run": number, "kind": "training", **_training_loss(folder)})
            validation = _validation(folder, name)
            if validation["mean"]:
                lines.append({"run": number, "kind": "validation", **validation})
        if lines:
            found.append({"title": name, "lines": lines})
    return found


def _training_loss(folder: RunFolder) -> Curve:
    step, loss = loss_per_step(folder)
    by_step, ends = np.unique(folder.steps["step"], return_index=False), step_ends(folder.steps)
    end_s = np.full(len(by_step), -np.inf)
    np.maximum.at(end_s, np.searchsorted(by_step, folder.steps["step"]), ends)
    return thin(_axes(folder, step, end_s), loss)


def _axes(folder: RunFolder, step: Records, times: Floats) -> dict[str, Records | Floats]:
    """What a curve can be drawn against, of points at these steps and Unix times."""
    return {
        "step": step,
        "samples": samples_by(folder, step),
        "seconds": folder.elapsed(times),
        "bytes": folder.sent_by(times),
    }


def _validation(folder: RunFolder, metric: str) -> Curve:
    step, times, values = _validations(folder, metric)
    return thin(_axes(folder, step, times), values)


def _validations(folder: RunFolder, metric: str) -> tuple[Records, Floats, Floats]:
    """Of each validation that has the metric: its step, Unix time and value."""
    events = [e for e in folder.validations if isinstance(_metric(e, metric), (int, float))]
    step = np.array([int(e["step"]) for e in events], dtype=np.int64)
    times = np.array([float(e["time"]) for e in events])
    return step, times, np.array([float(_metric(e, metric)) for e in events])


def validation_points(folder: RunFolder) -> list[tuple[float, float]]:
    """Seconds since the first step began, and the loss, of each validation with a finite loss."""
    _, times, losses = _validations(folder, "loss")
    if not len(folder.steps):
        return []
    seconds = folder.elapsed(times) - float(folder.elapsed(folder.steps["begin"].min()))
    points = zip(seconds.tolist(), losses.tolist(), strict=True)
    return [(second, loss) for second, loss in points if math.isfinite(loss)]


def _metric(event: dict[str, Any], name: str) -> Any:
    return (event.get("metrics") or {}).get(name)


def samples_by(folder: RunFolder, steps: Records) -> Floats:
    """Samples of all committed steps up to and including each of `steps`, [steps]."""
    order = np.argsort(folder.ledger["step"], kind="stable")
    ledger = folder.ledger[order]
    total = np.concatenate([[0], np.cumsum(ledger["stop"] - ledger["first"])])
    sums: Floats = total[np.searchsorted(ledger["step"], steps, side="right")].astype(np.float64)
    return sums


def thin(axes: Mapping[str, Records | Floats], values: Floats) -> Curve:
    """At most `POINTS` points of a curve; `low` and `high` only where points were merged."""
    count = len(values)
    edges = np.unique(np.linspace(0, count, min(count, POINTS) + 1).astype(np.int64))
    last = edges[1:] - 1
    finite = np.isfinite(values)
    curve: Curve = {name: _numbers(axis[last]) for name, axis in axes.items()}
    curve["mean"] = []
    if not count:
        return curve
    begin = edges[:-1]
    known = np.add.reduceat(finite, begin, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), begin)
    curve["mean"] = _numbers(np.where(known > 0, total / np.maximum(known, 1), np.nan))
    if count > POINTS:
        lowest = np.minimum.reduceat(np.where(finite, values, np.inf), begin)
        highest = np.maximum.reduceat(np.where(finite, values, -np.inf), begin)
        curve["low"], curve["high"] = _numbers(lowest), _numbers(highest)
    return curve


def throughput(folder: RunFolder, worker: int) -> Floats:
    """Samples per second of one worker over the length of the run, [points].

    Point i covers the i-th of equal parts of the run; a part shorter than a
    step shows the speed of that step.
    """
    steps = folder.steps_of(worker)
    edges = np.linspace(0.0, folder.seconds, _STRIP_POINTS + 1)
    if not len(steps) or folder.seconds <= 0:
        return np.zeros(_STRIP_POINTS)
    ends = np.maximum.accumulate(folder.elapsed(step_ends(steps)))
    begin = folder.elapsed(steps["begin"][:1])
    done = np.concatenate([[0], np.cumsum(steps["samples"])])
    by_edge = np.interp(edges, np.concatenate([begin, ends]), done)
    speed: Floats = np.diff(by_edge) / np.diff(edges)
    return speed


def _numbers(values: Records | Floats) -> list[float | None]:
    if values.dtype.kind in "iu":
        return [int(v) for v in values]
    return [float(f"{v:.{_DIGITS}g}") if np.isfinite(v) else None for v in values]
