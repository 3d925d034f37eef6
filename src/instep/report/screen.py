"""The table of a running job as text, fitted to a width and a height. Pure, so tests read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from instep.report.figures import Figures, Row
from instep.units import readable_bytes, readable_count, readable_share
from instep.words import (
    corruption_in_words,
    metrics_in_words,
    of_what,
    plural,
    printable,
    short_number,
    some_workers,
    start_in_words,
    stop_words,
    whole_seconds,
)

Line = list[tuple[str, str]]
"""Pieces of one line of the screen: (text, style)."""

MOST_ROWS, MOST_COLUMNS = 12, 100


def progress_words(figures: Figures) -> str:
    """`epoch 3/10  step 2,114/9,380`."""
    epochs = f"/{figures.epochs}" if figures.epochs else ""
    total = f"/{readable_count(figures.total)}" if figures.total else ""
    return f"epoch {figures.epoch + 1}{epochs}  step {readable_count(figures.step)}{total}"


def eta(figures: Figures) -> str:
    """`eta 12 s`, or nothing where nobody can know."""
    return f"eta {whole_seconds(figures.eta_s)}" if figures.eta_s else ""


def notice(event: dict[str, Any], *, generations: int = 1) -> str | None:
    """The line that both views give an event which nobody should miss; None for the others.

    Args:
        event: any event.
        generations: how many have started so far; the first of them is no news.
    """
    what = event["event"]
    if what == "warning":
        return f"warning: {event['text']}"
    if what == "worker_failed":
        during = f" ({event['phase']})" if event["phase"] else ""
        return f"worker {event['worker']} failed at step {event['step']}{during}"
    if what == "same_as_one_machine":
        return f"same as one machine: {event['verdict']}"
    if what == "corruption_found":
        return f"corruption: {corruption_in_words(event)}"
    if what == "stop_requested" and event["by"] in ("master", "workers"):
        return f"stopping: {stop_words(event)}"
    if what == "stop_requested":
        return f"stopping at the next commit, asked by {event['by']}"
    if what == "worker_hung":
        where = f" ({event['where']})" if event["where"] else ""
        return f"worker {event['worker']} {event['how']} in {event['phase']}{where}"
    if what == "worker_leaving":
        return f"worker {event['worker']} was told to leave; {event['successor']} comes instead"
    if what == "scaled":
        return f"from {event['before']} to {event['workers']} workers at one of the next commits"
    if what == "master_started" and event["again"]:
        why = f" ({event['why']})" if event.get("why") else ""
        return f"the master was lost{why}; another has taken its place"
    if what == "went_back":
        return f"nobody was left: back to step {event['resumed_step']}"
    if what == "model_loaded":
        return f"started from {start_in_words(event)}"
    if what == "generation_started" and generations > 1:
        members = some_workers(event["members"])
        return f"generation {event['generation']}: {members} ({event['reason']})"
    return None


def screen(figures: Figures, width: int, height: int, bar: str = "━─") -> list[Line]:
    """The whole view as text: lines of at most `width` columns, at most `height` of them.

    Args:
        figures: what to show.
        width: columns of the terminal; beyond 100 the rest stays empty.
        height: lines of the terminal.
        bar: two characters, of what is done and of what is left.
    """
    width = min(width, MOST_COLUMNS)
    top = _training(figures, width, bar) if figures.step else _starting(figures)
    most_rows = max(1, min(MOST_ROWS, height - len(top) - 7))
    lines: list[Line] = [[(heading(figures, width), "bold")], *top, []]
    lines += _table(figures, most_rows, width)
    lines += [[], [(_foot(figures, width), "dim")]]
    return [_cut(line, width) for line in lines][: max(height - 1, 1)]


def heading(figures: Figures, width: int) -> str:
    """Name, sizes and strategy, in one line of at most `width` columns."""
    job, ready = figures.job, figures.ready
    parts = [figures.name, plural(job.workers, "worker"), job.sync.name]
    parts.append(f"batch {readable_count(job.train.global_batch)}")
    if ready:
        parts.append(plural(ready["samples"], "sample"))
        parts.append(plural(ready["parameters"], "parameter"))
    return _fit(parts, width)


def _fit(parts: Iterable[str], width: int, gap: str = "   ") -> str:
    """As many of the parts, in order, as fit; the first in any case."""
    kept = ""
    for part in parts:
        longer = f"{kept}{gap}{part}" if kept else part
        if kept and len(longer) > width:
            break
        kept = longer
    return kept


def _cut(line: Line, width: int) -> Line:
    kept: Line = []
    for text, style in line:
        shown = printable(text)[: max(width, 0)]
        width -= len(shown)
        kept.append((shown, style))
    return kept


def _starting(figures: Figures) -> list[Line]:
    known = len(figures.workers)
    joined = sum(worker in figures.states for worker in figures.workers)
    ready = sum(figures.states.get(worker) == "ready" for worker in figures.workers)
    elapsed = whole_seconds(figures.clock() - figures.began)
    return [
        [("starting", "cyan"), (f"   {joined} of {known} joined, {ready} ready   {elapsed}", "")],
        [(figures.waiting_for(), "")],
    ]


def _training(figures: Figures, width: int, bar: str) -> list[Line]:
    loss = figures.loss
    line: Line = [
        ("training loss ", ""),
        (short_number(loss), "bold" if math.isfinite(loss) else "bold red"),
        (f" ({of_what(figures.job.train.steps)})", ""),
    ]
    checked = figures.validated
    found = (
        f"{metrics_in_words(checked)}   at step {readable_count(checked['step'])}"
        if checked
        else "-"
    )
    return [_progress(figures, width, bar), line, [("validation  ", ""), (found, "")]]


def _progress(figures: Figures, width: int, bar: str) -> Line:
    position, total = progress_words(figures), figures.total
    if not total:
        return [(position, "")]
    done = min(figures.step / total, 1.0)
    tail = f"{math.floor(100 * done):3d} %  {eta(figures):<10}"
    room = max(width - len(position) - len(tail) - 4, 0)
    filled = int(room * done)
    return [
        (f"{position}  ", ""),
        (bar[0] * filled, "green"),
        (bar[1] * (room - filled), "bright_black"),
        (f"  {tail}", ""),
    ]


_COLUMNS = (
    ("worker", 7),
    ("state", 11),
    ("samples/s", 9),
    ("share", 5),
    ("wait", 5),
    ("sent", 7),
    ("received", 8),
)


def _table(figures: Figures, most: int, width: int) -> list[Line]:
    gap = " " * max(1, min(3, (width - sum(size for _, size in _COLUMNS)) // len(_COLUMNS)))
    names = [name for name, _ in _COLUMNS]
    rows, whole = figures.rows(most)
    if not figures.step:
        lines = [[*_cells([row.name, row.state], gap), (gap + row.note, "dim")] for row in rows]
        return [_cells(names[:2], gap, "dim"), *lines]
    lines = [_cells(_figures(row), gap) for row in rows]
    if len(rows) > 1:
        lines.append(_cells(_figures(whole), gap, "dim"))
    return [_cells(names, gap, "dim"), *lines]


def _figures(row: Row) -> list[str]:
    cells = [row.name, row.state, readable_count(row.rate) if row.rate else "-"]
    cells += [readable_share(part, 1) if row.rate else "-" for part in (row.share, row.wait)]
    return cells + [readable_bytes(size) if size else "-" for size in (row.sent, row.received)]


def _cells(cells: Sequence[str], gap: str, style: str = "") -> Line:
    """A row: two columns flush left, figures flush right, the state in its colour."""
    colours = {"failed": "red", "exit": "red", "slow": "yellow", "quiet": "yellow"}
    padded = [
        f"{text:<{size}}" if place < 2 else f"{text:>{size}}"
        for place, (text, (_, size)) in enumerate(zip(cells, _COLUMNS, strict=False))
    ]
    colour = colours.get(cells[1].partition(" ")[0], style)
    figures = "".join(gap + text for text in padded[2:])
    return [(padded[0] + gap, style), (padded[1], colour), (figures, style)]


def _foot(figures: Figures, width: int) -> str:
    parts = [f"committed {plural(figures.committed, 'sample')}"]
    if figures.saved:
        when, event = figures.saved
        ago = whole_seconds(figures.clock() - when)
        parts.append(f"checkpoint at step {readable_count(event['step'])}, {ago} ago")
    else:
        parts.append("no checkpoint yet")
    parts.append(f"running {whole_seconds(figures.clock() - figures.began)}")
    return _fit(parts, width)
