"""Curves of a run, thinned so that a page stays small for any length of run.

Each curve carries four x axes: the step, the samples used, the seconds of the run by then,
and the bytes that all workers had sent. If several points share a bucket, their mean, lowest and
highest are kept; values that are not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from instep.report.figures.summary import OWN, loss_per_step
from instep.store.run_files import Floats, Records, step_ends
from instep.store.run_folder import RunFolder

POINTS = 400
"""Most points of one curve."""

LOG_FROM = 12.0
"""A chart is logarithmic if its largest value is so many times its median."""

_STRIP_POINTS = 160
_DIGITS = 6  # significant; a pixel is coarser

Curve = dict[str, list[float | None]]


def charts(runs: list[RunFolder]) -> list[dict[str, Any]]:
    """What the page draws: one chart for each quantity, in it the lines of every run.

    `loss` first, training and validation together; then each validation metric, what callbacks have
    logged, learning rate, norm of the gradient, and speed. `log` says that a logarithmic axis shows
    more.
    """
    names = dict.fromkeys(["loss"])
    for folder in runs:
        for event in folder.validations:
            names.update(dict.fromkeys(event.get("metrics") or {}))
    found: list[dict[str, Any]] = []
    for name in names:
        lines = []
        for number, folder in enumerate(runs):
            if name == "loss" and len(folder.steps) and not folder.spec.privacy.on:
                training = _training_loss(folder)
                lines.append({"run": number, "kind": "training", **training})
            validation = _validation(folder, name)
            if validation["mean"]:
                lines.append({"run": number, "kind": "validation", **validation})
        found.append({"title": name, "lines": lines})
    logged = dict.fromkeys(name for folder in runs for name in folder.logged)
    others: dict[str, Callable[[RunFolder], Curve | None]] = {
        name: partial(_logged, name=name) for name in logged if not name.startswith(OWN)
    }
    others["learning rate"] = partial(_logged, name=f"{OWN}learning_rate", steps=True)
    others |= {"gradient norm": _gradient_norm, "samples per second": _speed}
    for title, curve in others.items():
        curves = [(number, curve(folder)) for number, folder in enumerate(runs)]
        lines = [{"run": n, "kind": "", **each} for n, each in curves if each]
        found.append({"title": title, "lines": lines})
    for chart in found:
        chart["log"] = chart["title"] != "samples per second" and _spans(chart["lines"])
    return [chart for chart in found if chart["lines"]]


def _spans(lines: list[dict[str, Any]]) -> bool:
    values = [value for line in lines for value in line["mean"] if value is not None]
    return has_low_values_mostly(np.array(values, np.float64))


def has_low_values_mostly(values: Floats) -> bool:
    """Whether values, [any] finite, are above 0 and fill a linear axis so that most of them lie at
    its foot."""
    above = bool(len(values)) and values.min() > 0
    return bool(above and values.max() > LOG_FROM * np.median(values))


def _logged(folder: RunFolder, name: str, *, steps: bool = False) -> Curve | None:
    """Values that were logged; `steps`: only where they changed, so that one holds until then."""
    points = sorted(folder.logged.get(name, {}).items())
    if not points:
        return None
    step = np.array([at for at, _ in points])
    value, times = (np.array(each) for each in zip(*(point for _, point in points), strict=True))
    if steps and step[-1] < folder.last_step:
        step, value = np.append(step, folder.last_step), np.append(value, value[-1])
        times = np.append(times, step_ends(folder.steps).max(initial=times[-1]))
    return thin(_axes(folder, step, times), value)


def _gradient_norm(folder: RunFolder) -> Curve | None:
    norms = folder.steps[np.isfinite(folder.steps["gradient_norm"])]
    step, where = np.unique(norms["step"], return_index=True)
    if not len(step):
        return None
    values = norms["gradient_norm"][where].astype(np.float64)
    return thin(_axes(folder, step, step_ends(norms[where])), values)


def _speed(folder: RunFolder) -> Curve | None:
    """Samples per second of all workers together, over equal parts of the time of the run.

    Time between two sessions is no part of it.
    """
    steps = folder.steps
    if len(steps) < 2:
        return None
    moments = np.sort(step_ends(steps))
    order = np.argsort(step_ends(steps))
    ends, begin = folder.times.elapsed(moments), float(folder.times.elapsed(steps["begin"].min()))
    parts = min(_STRIP_POINTS, len(np.unique(steps["step"])))
    edges = np.linspace(begin, float(ends[-1]), parts + 1)
    done = np.concatenate([[0], np.cumsum(steps["samples"][order])])
    by_edge = np.interp(edges, np.concatenate([[begin], ends]), done)
    reached = np.maximum.accumulate(steps["step"][order])
    at = reached[np.minimum(np.searchsorted(ends, edges[1:]), len(ends) - 1)]
    speed = np.diff(by_edge) / np.maximum(np.diff(edges), 1e-9)
    return thin(_axes(folder, at, np.interp(edges[1:], ends, moments)), speed)


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
        "seconds": folder.times.elapsed(times),
        "bytes": folder.traffic.sent_by(times),
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
    seconds = folder.times.elapsed(times) - float(folder.times.elapsed(folder.steps["begin"].min()))
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
    edges = np.linspace(0.0, folder.times.seconds, _STRIP_POINTS + 1)
    if not len(steps) or folder.times.seconds <= 0:
        return np.zeros(_STRIP_POINTS)
    ends = np.maximum.accumulate(folder.times.elapsed(step_ends(steps)))
    begin = folder.times.elapsed(steps["begin"][:1])
    done = np.concatenate([[0], np.cumsum(steps["samples"])])
    by_edge = np.interp(edges, np.concatenate([begin, ends]), done)
    speed: Floats = np.diff(by_edge) / np.diff(edges)
    return speed


def _numbers(values: Records | Floats) -> list[float | None]:
    if values.dtype.kind in "iu":
        return [int(v) for v in values]
    return [float(f"{v:.{_DIGITS}g}") if np.isfinite(v) else None for v in values]
