"""The part of the report page that compares runs: their results, and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from instep.report.figures.settings import flat
from instep.report.page.markup import MOST_ROWS, Html, figure, section, shortened, table, tag
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds

_FIGURES = {
    "outcome": None,
    "steps": readable_count,
    "samples": readable_count,
    "loss": None,
    "workers": None,
    "seconds": readable_seconds,
    "samples_per_second": readable_count,
    "wire_bytes": readable_bytes,
    "generations": None,
    "repeated_samples": None,
    "missing_samples": None,
    "parameters_sha256": lambda digest: f"{digest[:12]}...",
}
"""Keys of a summary, and how the value of each is shown."""


def comparison(runs: list[RunFolder], summaries: list[dict[str, Any]], names: list[str]) -> Html:
    """Runs side by side: figures, validation metrics among them, and settings that differ."""
    head = [tag("span", name, class_=f"run{at % 8}") for at, name in enumerate(names)]
    rows = []
    for name, unit in _FIGURES.items():
        rows.append([name.replace("_", " "), *(figure(each[name], unit) for each in summaries)])
        if name == "loss":
            for metric in dict.fromkeys(key for each in summaries for key in each["metrics"]):
                values = [figure(each["metrics"].get(metric)) for each in summaries]
                rows.append([f"validation {metric}", *values])
    changed = differing_settings(*(each.job for each in runs))[:MOST_ROWS]
    settings = (
        table(["setting", *head], [[shortened(cell) for cell in row] for row in changed])
        if changed
        else tag("p", "None: all runs were given the same job.", class_="note")
    )
    title = tag("h3", "Settings that differ")
    return section("Side by side", table(["figure", *head], rows), title, settings)


def run_names(runs: list[RunFolder]) -> list[str]:
    """What to call each run: its folder's name, or the whole path if two names are equal."""
    names = [folder.path.absolute().name for folder in runs]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in runs]


def _without_equal(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs without the sections in which they are all equal."""
    encoded = [{key: msgspec.json.encode(value) for key, value in job.items()} for job in jobs]
    first = encoded[0].items() if encoded else ()
    equal = {key for key, text in first if all(each.get(key) == text for each in encoded)}
    return [{key: value for key, value in job.items() if key not in equal} for job in jobs]


def differing_settings(*jobs: dict[str, Any]) -> list[tuple[str, ...]]:
    """Keys of jobs whose values differ, as (`section.key`, value, value, ...).

    A key that a job does not have reads `not given` there.
    """
    tables = [dict(flat(job)) for job in _without_equal(jobs)]
    keys = dict.fromkeys(key for each in tables for key in each)
    rows = [(key, *(each.get(key, "not given") for each in tables)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
