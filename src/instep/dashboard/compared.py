"""Runs beside each other: their curves, what their jobs differ in, their hashes.

Way in: `compare`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.dashboard.curves import Chart, Curve, Values, live_charts, plain
from instep.dashboard.listing import why_unread
from instep.dashboard.live import LiveRun
from instep.report.figures.identity import differing_settings, hashes_of

MOST_RUNS, _MOST_SETTINGS, _FEW, _POINTS = 250, 60, 12, 160
"""Runs at once; settings that differ; runs up to which every point of a curve is told, and points
of each above."""


def compare(paths: list[Path]) -> dict[str, Any]:
    """Curves of each run, thinned if there are many, settings that differ, and hashes."""
    names, jobs, drawn, hashes, unread = [], [], [], [], []
    for path in paths:
        try:
            run = LiveRun(path, figures=False)
            run.look()
        except Exception as error:  # a folder may hold anything, and others are compared
            unread.append({"name": path.name, "error": why_unread(error)})
            continue
        names.append(path.name)
        jobs.append(run.job)
        drawn.append(live_charts(run))
        hashes.append(hashes_of(run.last))
    few = len(names) <= _FEW
    titles = dict.fromkeys(chart.title for charts in drawn for chart in charts)
    charts = []
    for title in titles:
        of_it = [(n, each) for n, mine in enumerate(drawn) for each in mine if each.title == title]
        lines = [
            {"run": number, **line}
            for number, chart in of_it
            for line in plain([_thinned(chart, few)])[0]["lines"]
        ]
        charts.append({"title": title, "log": any(c.log for _, c in of_it), "lines": lines})
    settings = differing_settings(*jobs)[:_MOST_SETTINGS] if len(jobs) > 1 else []
    return {
        "runs": names,
        "charts": charts,
        "settings": settings,
        "hashes": hashes,
        "unread": unread,
    }


def _thinned(chart: Chart, few: bool) -> Chart:
    """All of a chart, or where there are many runs some points of each line, and no bands."""
    if few:
        return chart
    return chart._replace(lines=[Curve(kind, _some(values)) for kind, values in chart.lines])


def _some(values: Values) -> Values:
    every = -(-len(values["mean"]) // _POINTS)
    keep = slice((len(values["mean"]) - 1) % every, None, every)  # the last one always
    return {name: each[keep] for name, each in values.items() if name not in ("low", "high")}
