"""The part of the report page that compares runs: their results, and their settings."""

from __future__ import annotations

from typing import Any

from instep.report.figures.identity import differing_settings
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
