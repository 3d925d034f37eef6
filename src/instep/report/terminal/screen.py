"""The table of a running job as text, fitted to a width and a height. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from instep.report.figures.progress import Progress, Row
from instep.units import readable_bytes, readable_count, readable_share
from instep.words import (
    AGAIN,
    asked_by,
    balance_in_words,
    corruption_in_words,
    lengths_in_words,
    member,
    members,
    metrics_in_words,
    of_what,
    plural,
    printable,
    short_number,
    some_members,
    split_in_words,
    start_in_words,
    stop_words,
    stream_in_words,
    whole_seconds,
)

LOST = "the next start goes on from the newest checkpoint"

Line = list[tuple[str, str]]
"""Pieces of one line of the screen: (text, style)."""

MOST_ROWS, MOST_COLUMNS = 12, 100


def progress_words(progress: Progress) -> str:
    """`epoch 3/10  step 2,114/9,380`."""
    epochs = f"/{progress.epochs}" if progress.epochs else ""
    total = f"/{readable_count(progress.total)}" if progress.total else ""
    return f"epoch {progress.epoch + 1}{epochs}  step {readable_count(progress.step)}{total}"


def eta(progress: Progress) -> str:
    """`eta 12 s`; empty if it is not known."""
    return f"eta {whole_seconds(progress.eta_s)}" if progress.eta_s else ""


def waiting_for(progress: Progress) -> str:
    """Say in words what has to happen before the first step."""
    absent = [w for w in progress.workers if w not in progress.states]
    if absent:
        return f"waiting for {some_members(absent, progress.servers)} to join"
    unready = [w for w in progress.workers if progress.states[w] == "joined"]
    if unready:
        named = some_members(unready, progress.servers)
        if all(worker in progress.tried for worker in unready):
            done, of = min(progress.tried[worker] for worker in unready)
            return f"comparing micro-batches with whole batches: {done} of {of} ({named})"
        return f"waiting for {named} to load the model and the data"
    return "waiting for the first step"


def notice(
    event: dict[str, Any], *, generations: int = 1, servers: Collection[int] = ()
) -> str | None:
    """The line that both views print for an important event; None for the other events.

    Args:
        event: any event.
        generations: how many have started so far; the first one gets no line.
        servers: numbers of the parameter servers.
    """
    try:
        return _in_words(event, generations, servers)
    except KeyError:  # it lacks a field: an older version wrote it
        return str(event["event"]).replace("_", " ")


def _in_words(event: dict[str, Any], generations: int, servers: Collection[int]) -> str | None:
    what, who = event["event"], member(event.get("worker"), servers)
    if (text := _TEXTS.get(what)) is not None:
        return text(event)
    if what == "worker_failed":
        during = f" ({event['phase']})" if event["phase"] else ""
        return f"{who} failed at step {event['step']}{during}"
    if what == "worker_hung":
        where = f" ({event['where']})" if event["where"] else ""
        return f"{who} {event['how']} in {event['phase']}{where}"
    if what == "worker_leaving":
        return f"{who} leaves; {who.split()[0]} {event['successor']} replaces it"
    if what == "replica_waits":
        there = some_members(event["workers"], servers)
        lack = some_members(event["missing"], servers)
        return f"replica {event['replica']} waits for {lack} (it has {there})"
    if what == "master_started" and event["again"]:
        why = f" ({event['why']})" if event.get("why") else ""
        return f"the master was lost{why}; another one has replaced it"
    if what == "generation_started" and generations > 1:
        named = some_members(event["members"], servers)
        return f"continuing with {named} ({event['reason']})"
    return None


def _stopping(event: dict[str, Any]) -> str:
    if event["by"] in ("master", "workers"):
        return f"stopping: {stop_words(event)}"
    if event.get("why", "").endswith(AGAIN):
        return f"stopping now, as {asked_by(event['by'])} asked again: {LOST}"
    if not event.get("step", 1):
        return f"stopping before the first step, as {asked_by(event['by'])} asked"
    return f"stopping after the current step, as {asked_by(event['by'])} asked"


_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "warning": lambda e: f"warning: {e['text']}",
    "data_balanced": lambda e: f"balance {balance_in_words(e)}",
    "data_lengths": lambda e: f"lengths: {lengths_in_words(e)}",
    "stream_divided": lambda e: f"stream {stream_in_words(e)}",
    "samples_chosen": lambda e: f"{e['dataset']}: {e['text']}",
    "data_split": lambda e: f"split {split_in_words(e)}",
    "same_as_one_machine": lambda e: f"same as one machine: {e['verdict']}",
    "corruption_found": lambda e: f"corruption: {corruption_in_words(e)}",
    "stop_requested": _stopping,
    "hosts_added": lambda e: f"another job has {plural(len(e['hosts']), 'host')} for this run",
    "hosts_leaving": lambda e: (
        f"another job takes {plural(len(e['hosts']), 'host')} away: {e['why']}"
    ),
    "scaled": lambda e: (
        f"changing from {e['before']} to {e['workers']} workers at one of the next steps"
    ),
    "parameters_taken": lambda e: (
        f"worker {e['worker']} took {plural(e['tensors'], 'tensor')} from rank 0: its machine had "
        f"rounded them differently, by up to {e['apart']:.1g} of their largest values"
    ),
    "taken_from_host": lambda e: (
        f"replica {e['replica']} continues from memory of its host, which had step "
        f"{readable_count(e['step'])}"
    ),
    "went_back": lambda e: (
        f"no worker was left: back to the checkpoint of step {e['resumed_step']}"
    ),
    "model_loaded": lambda e: f"started from {start_in_words(e)}",
    "lora_added": lambda e: f"LoRA: {e['text']}",
}


def screen(progress: Progress, width: int, height: int, bar: str = "━─") -> list[Line]:
    """The whole view as text: at most `height` lines of at most `width` columns.

    Args:
        progress: what to show.
        width: columns of the terminal; at most 100 are used.
        height: lines of the terminal.
        bar: two characters, for what is done and for what is left.
    """
    width = min(width, MOST_COLUMNS)
    top = _training(progress, width, bar) if progress.step else _starting(progress)
    most_rows = max(1, min(MOST_ROWS, height - len(top) - 7))
    lines: list[Line] = [[(heading(progress, width), "bold")], *top, []]
    lines += _table(progress, most_rows, width)
    lines += [[], [(_foot(progress, width), "dim")]]
    return [_cut(line, width) for line in lines][: max(height - 1, 1)]


def heading(progress: Progress, width: int) -> str:
    """Name, sizes and strategy, in one line of at most `width` columns."""
    job, ready = progress.job, progress.ready
    parts = [progress.name, members(job.workers, job.sync.server_count), job.sync.name]
    if job.mesh.ranks > 1:
        parts.append(f"mesh {job.mesh.axes}")
    tokens = job.train.tokens_per_batch
    parts.append(f"batch {readable_count(tokens or job.train.global_batch)}")
    parts[-1] += " tokens" if tokens else ""
    if ready:
        parts.append(plural(ready["samples"], "sample"))
        if "parameters" in ready:
            parts.append(plural(ready["parameters"], "parameter"))
    return _fit(parts, width)


def _fit(parts: Iterable[str], width: int, gap: str = "   ") -> str:
    """As many of the parts, in order, as fit; always the first."""
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


def _starting(progress: Progress) -> list[Line]:
    known = len(progress.workers)
    joined = sum(worker in progress.states for worker in progress.workers)
    ready = sum(progress.states.get(worker) == "ready" for worker in progress.workers)
    elapsed = whole_seconds(progress.clock() - progress.began)
    if progress.over:
        return [[("ended before the first step", "")]]
    return [
        [("starting", "cyan"), (f"   {joined} of {known} joined, {ready} ready   {elapsed}", "")],
        [(waiting_for(progress), "")],
    ]


def _training(progress: Progress, width: int, bar: str) -> list[Line]:
    loss = progress.loss
    line: Line = [
        ("training loss ", ""),
        (short_number(loss), "bold" if math.isfinite(loss) else "bold red"),
        (f" ({of_what(progress.job.train.steps)})", ""),
    ]
    if progress.job.privacy.on:
        line = [("training loss is not told in a private run", "")]
    checked = progress.validated
    found = (
        f"{metrics_in_words(checked)}   at step {readable_count(checked['step'])}"
        if checked
        else "-"
    )
    lines: list[Line] = [_bar_line(progress, width, bar), line, [("validation  ", ""), (found, "")]]
    if progress.logged:
        lines.append([("logged  ", ""), (logged_words(progress, width - 8), "")])
    return lines


def logged_words(progress: Progress, width: int) -> str:
    """The newest values that callbacks have logged, as many as fit."""
    return _fit([f"{n} {short_number(v)}" for n, v in progress.logged.items()], width)


def _bar_line(progress: Progress, width: int, bar: str) -> Line:
    position, total = progress_words(progress), progress.total
    if not total:
        return [(position, "")]
    done = min(progress.step / total, 1.0)
    tail = f"{math.floor(100 * done):3d} %  {eta(progress):<10}"
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


def _table(progress: Progress, most: int, width: int) -> list[Line]:
    gap = " " * max(1, min(3, (width - sum(size for _, size in _COLUMNS)) // len(_COLUMNS)))
    names = [name for name, _ in _COLUMNS]
    rows, whole = progress.rows(most)
    if not progress.step:
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
    """A row: two columns aligned left, figures aligned right, the state in its colour."""
    colours = {"failed": "red", "exit": "red", "slow": "yellow", "quiet": "yellow"}
    padded = [
        f"{text:<{size}}" if place < 2 else f"{text:>{size}}"
        for place, (text, (_, size)) in enumerate(zip(cells, _COLUMNS, strict=False))
    ]
    colour = colours.get(cells[1].partition(" ")[0], style)
    figures = "".join(gap + text for text in padded[2:])
    return [(padded[0] + gap, style), (padded[1], colour), (figures, style)]


def _foot(progress: Progress, width: int) -> str:
    parts = [f"committed {plural(progress.committed, 'sample')}"]
    if progress.saved:
        when, event = progress.saved
        ago = "" if progress.over else f", {whole_seconds(progress.clock() - when)} ago"
        parts.append(f"checkpoint at step {readable_count(event['step'])}{ago}")
    else:
        parts.append("no checkpoint yet")
    if not progress.over:
        parts.append(f"running {whole_seconds(progress.clock() - progress.began)}")
    return _fit(parts, width)
