"""The curves of a page, of a run that trains or has ended: those of its report.

A chart is a title and lines; a line has four x axes and `mean`, and `low` and `high` where a point
stands for several steps. Ways in: `live_charts`, `settled_charts`, and `changes` between two looks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import msgspec
import numpy as np

from instep.dashboard.fold import Fold, PointsSoFar
from instep.dashboard.live import LiveRun
from instep.report.figures.curves import charts, has_low_values_mostly
from instep.report.figures.summary import OWN
from instep.store.run_files import Event, Floats, Records
from instep.store.run_folder import RunFolder

_SPEEDS, _DIGITS = 160, 6  # digits of %.6g

Values = dict[str, Floats]
"""By name of the axis, or `mean`, `low`, `high`: [points] each, NaN for gaps."""


class Curve(NamedTuple):
    """A curve in a chart."""

    kind: str
    """`training`, `validation`, or nothing."""
    values: Values


class Chart(NamedTuple):
    """Curves of one quantity."""

    title: str
    log: bool
    """Whether a logarithmic axis shows more."""
    lines: list[Curve]


def settled_charts(folder: RunFolder) -> list[Chart]:
    """Those of the report, point for point."""
    found = []
    for chart in charts([folder]):
        lines = [
            Curve(
                line["kind"], {k: _floats(v) for k, v in line.items() if k not in ("run", "kind")}
            )
            for line in chart["lines"]
        ]
        found.append(Chart(chart["title"], chart["log"], lines))
    return found


def _floats(values: list[float | None]) -> Floats:
    return np.array([np.nan if each is None else each for each in values], np.float64)


def live_charts(run: LiveRun) -> list[Chart]:
    """Charts of the same quantities, of what there is by now."""
    loss, norm = run.steps.curves()
    validations = _validations(run)
    lines = [Curve("training", _line(run, loss))] if len(loss.step) else []
    if "loss" in validations:
        lines.append(Curve("validation", validations.pop("loss")))
    found = [("loss", lines)]
    found += [(name, [Curve("validation", values)]) for name, values in validations.items()]
    rate = f"{OWN}learning_rate"
    for name, points in run.logged.items():
        if not name.startswith(OWN):
            found.append((name, [Curve("", _line(run, points.fold()))]))
    if rate in run.logged:
        found.append(
            ("learning rate", [Curve("", _held(run, _line(run, run.logged[rate].fold())))])
        )
    found.append(("gradient norm", [Curve("", _line(run, norm))]))
    found.append(("samples per second", [Curve("", _speed(run, loss))]))
    kept = [(title, [line for line in lines if len(line.values["mean"])]) for title, lines in found]
    return [Chart(title, _is_log(title, lines), lines) for title, lines in kept if lines]


def _is_log(title: str, lines: list[Curve]) -> bool:
    means = [line.values["mean"][np.isfinite(line.values["mean"])] for line in lines]
    return title != "samples per second" and has_low_values_mostly(np.concatenate(means))


def _line(run: LiveRun, fold: Fold) -> Values:
    return {**_axes(run, fold.step, fold.time), **fold.curve()}


def _axes(run: LiveRun, step: Records, times: Floats) -> Values:
    return {
        "step": step.astype(np.float64),
        "samples": run.ledger.samples_by(step),
        "seconds": run.times.elapsed(times),
        "bytes": run.traffic.sent_by(times, run.steps.begin),
    }


def _held(run: LiveRun, line: Values) -> Values:
    """A value that holds until it changes, up to the last step."""
    if line["step"][-1] >= run.last_step:
        return line
    end = _axes(run, np.array([run.last_step]), np.array([max(run.steps.end, 0.0)]))
    last = {name: end.get(name, values[-1:]) for name, values in line.items()}
    return {name: np.append(values, last[name]) for name, values in line.items()}


def _validations(run: LiveRun) -> dict[str, Values]:
    """By metric, in the order in which the first validation has them."""
    found = run.once("validations", lambda: _folded(run.named("validated")))
    return {name: _line(run, points.fold()) for name, points in found.items()}


def _folded(validations: list[Event]) -> dict[str, PointsSoFar]:
    found = defaultdict[str, PointsSoFar](PointsSoFar)
    for event in validations:
        for name, value in (event.get("metrics") or {}).items():
            if isinstance(value, int | float):
                found[name].add(event["step"], float(value), float(event["time"]))
    return found


def _speed(run: LiveRun, loss: Fold) -> Values:
    """Samples per second of all workers together, between some of the steps."""
    step, times = loss.step, loss.time
    if len(step) < 2:
        return {"mean": np.zeros(0)}
    every = 1 << max(
        0, (len(step) // _SPEEDS).bit_length()
    )  # so that most edges stay where they are
    edges = np.unique(np.append(np.arange(0, len(step) - 1, every), len(step) - 1))
    axes = _axes(run, step[edges], times[edges])
    speed = np.diff(axes["samples"]) / np.maximum(np.diff(axes["seconds"]), 1e-9)
    return {**{name: values[1:] for name, values in axes.items()}, "mean": speed}


def plain(charts: list[Chart]) -> list[dict[str, Any]]:
    """Charts as plain data."""
    return [
        {
            "title": chart.title,
            "log": chart.log,
            "lines": [{"kind": line.kind, **_since(line.values, 0)} for line in chart.lines],
        }
        for chart in charts
    ]


def changes(before: list[Chart], after: list[Chart]) -> list[dict[str, Any]] | None:
    """Points to be written over the ends of lines, as plain data; None if more has changed.

    Each says which chart and line, `from` which point on, and the points.
    """
    if [_shape(each) for each in before] != [_shape(each) for each in after]:
        return None
    found = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for which, (was, now) in enumerate(zip(old.lines, new.lines, strict=True)):
            at = _first_difference(was.values, now.values)
            if at < max(len(was.values["mean"]), len(now.values["mean"])):
                place = {"chart": number, "line": which, "from": at}
                found.append({**place, **_since(now.values, at)})
    return found


def _shape(chart: Chart) -> Any:
    return chart.title, chart.log, [(line.kind, sorted(line.values)) for line in chart.lines]


def _first_difference(old: Values, new: Values) -> int:
    at = min(len(old["mean"]), len(new["mean"]))
    for name, values in new.items():
        same = (old[name][:at] == values[:at]) | (np.isnan(old[name][:at]) & np.isnan(values[:at]))
        at = at if same.all() else int(np.argmin(same))
    return at


def _since(values: Values, at: int) -> dict[str, list[float | int | None]]:
    return {
        name: _whole(each[at:]) if name == "step" else _numbers(each[at:])
        for name, each in values.items()
    }


def _whole(values: Floats) -> list[float | int | None]:
    found: list[float | int | None] = values.astype(np.int64).tolist()
    return found


def _numbers(values: Floats) -> list[float | int | None]:
    """Values with so many digits, None for those that are not finite."""
    if len(values) and np.all(values == np.rint(values)) and np.abs(values).max() < 10**_DIGITS:
        return _whole(values)
    text = ",".join(["%.6g"] * len(values)) % tuple(values.tolist())
    text = text.replace("-inf", "null").replace("inf", "null").replace("nan", "null")
    found: list[float | int | None] = msgspec.json.decode(f"[{text}]")
    return found
