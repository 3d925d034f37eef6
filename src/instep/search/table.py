"""The trials of a search, for a person: a table, and a curve of the best value so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from instep.search.begin import SearchState
from instep.search.results import ToldTrial, best_of, name_of
from instep.units import readable_seconds
from instep.words import short_number

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60


def trial_line(number: int, told: ToldTrial, metric: str) -> str:
    """A trial that is over, in a line."""
    result = told.result
    values = "  ".join(f"{short(key)} {shown(value)}" for key, value in told.values.items())
    reached = "-" if result.value is None else short_number(result.value)
    why = f"   {result.why}" if result.state == "failed" else ""
    return (
        f"{name_of(number)}   {metric} {reached}   {result.state} after {result.steps} steps, "
        f"{readable_seconds(result.seconds)}   {values}{why}"
    )


def table_lines(found: SearchState, most: int = 12) -> list[str]:
    """The best trials, the best first, and how the best value grew."""
    metric, upwards = found.job.stop.metric, found.job.stop.upwards
    best = best_of(found.told, upwards, most)
    keys = [*found.job.search.ranges]
    rows = [("trial", metric, "steps", "took", *map(short, keys))]
    for number in best:
        values, result = found.told[number]
        value = "-" if result.value is None else f"{result.value:.6g}"
        seconds = readable_seconds(result.seconds)
        row = [name_of(number), value, str(result.steps), seconds]
        rows.append((*row, *(shown(values[key]) for key in keys)))
    told = f"told    {len(found.told)} of {found.trials}: {counts_of(found.told)}"
    curve = best_curve(found.told, upwards)
    return [*aligned(rows), told, *([f"best    {curve}"] if curve else [])]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def counts_of(told: Mapping[int, ToldTrial]) -> str:
    """The trials that are over, by what they have come to."""
    counts = [
        f"{count} {state}"
        for state in ("completed", "pruned", "failed")
        if (count := sum(each.result.state == state for each in told.values()))
    ]
    return ", ".join(counts) or "none"


def best_curve(told: Mapping[int, ToldTrial], upwards: bool) -> str:
    """The best value so far after each trial, from the worst to the best of them, in one line."""
    best, values = None, list[float]()
    for _, each in sorted(told.items()):
        value = each.result.value if each.result.state == "completed" else None
        if value is not None and (best is None or (value > best) == upwards):
            best = value
        if best is not None:
            values.append(best)
    return _bars(values[:: -(-len(values) // _COLUMNS)]) if values else ""


def _bars(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    bars = "".join(_BARS[round((each - low) / span * (len(_BARS) - 1))] for each in values)
    return f"{short_number(values[0])} {bars} {short_number(values[-1])}"


def short(key: str) -> str:
    """The last part of a key."""
    return key.rpartition(".")[2]


def shown(value: object) -> str:
    """A value of a key, in a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
