"""What a person sees while a run goes on: a calm table, or plain lines.

A view is told everything (each event, each new record) and says little: the
table redraws twice a second at most, the lines come every few seconds. What
is shown lives in `Figures`, which knows neither terminals nor colours, so a
screen can be tested as text. No view decides, waits or fails a run, and none
explains a failure: whoever runs the job prints the cause at the end.

The way in is `make_view`. `rich` is imported only where the table is drawn.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

from instep.spec import JobSpec
from instep.units import readable_bytes, readable_count, readable_seconds, readable_share

Records = np.ndarray[Any, np.dtype[Any]]
Line = list[tuple[str, str]]
"""Pieces of one line of the screen: (text, style)."""

MEMORY_S, MEMORY_STEPS = 10.0, 20.0
"""Rates forget the past at the pace of whichever is longer: seconds or steps."""
SLOW = 1.5
"""A worker this many times slower than the middle one is called slow."""
QUIET_S, QUIET_STEPS = 5.0, 5.0
"""A worker without records for this long, in seconds and in steps, is called quiet."""
REDRAW_S, LINE_S = 0.5, 5.0
MOST_ROWS, MOST_COLUMNS = 12, 100
DEFAULT_EPOCHS = 10

_PARTS = ("load_s", "forward_s", "backward_s", "wait_s", "wire_s", "update_s", "save_s")
_STEPS, _SAMPLES, _WORK, _WAIT, _WALL, _SUMS = range(6)


class View(Protocol):
    """Shows a run as it goes. `now` and the view's own clock are the same clock."""

    def event(self, event: dict[str, Any]) -> None:
        """One event, as it was written to `events.jsonl`."""

    def records(self, ledger: Records, steps: Records) -> None:
        """New records, [any] of `LEDGER` and [any] of `STEPS`: any workers, any many steps."""

    def tick(self, now: float) -> None:
        """Time has passed (seconds); called a few times a second."""

    def close(self) -> None:
        """Say the last word and leave the terminal as it was; a second call does nothing."""


def make_view(
    job: JobSpec,
    run: Path,
    *,
    stream: TextIO | None = None,
    json: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """A live table where `stream` is a terminal that can draw one, plain lines elsewhere.

    Args:
        job: the job as run; gives the length of the run.
        run: its folder, whose name heads the view.
        stream: where to write; standard error where none is given.
        json: plain lines in any case.
        clock: seconds, from any origin; `tick` is given times of the same clock.
    """
    stream = sys.stderr if stream is None else stream
    figures = Figures(job, run.name, clock)
    if json or not stream.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return PlainLines(figures, stream)
    return LiveTable(figures, stream)


class Row(NamedTuple):
    """One line of the table: a worker, several of them, or all."""

    name: str
    state: str
    rate: float  # samples per second
    share: float  # of the samples of recent steps, 0 to 1
    wait: float  # of the time of recent steps, 0 to 1
    sent: float  # bytes since the start
    received: float
    note: str = ""  # instead of the figures, before the first step


class Figures:
    """What is known of a run, in a size that does not grow with its length.

    Rates, shares and the loss shown are means over recent steps that fade
    out exponentially: over ten seconds, or over twenty steps where those are longer.
    """

    def __init__(self, job: JobSpec, name: str, clock: Callable[[], float]) -> None:
        self.job, self.name, self.clock = job, name, clock
        self.began = clock()
        self.workers = list(range(job.workers))
        self.states: dict[int, str] = {}
        self.phases: dict[int, dict[str, float]] = {}
        self.ready: dict[str, Any] = {}
        self.generations = 0
        self.step = self.epoch = self.committed = 0
        self.best = math.inf
        self.validated: dict[str, Any] = {}
        self.saved: tuple[float, dict[str, Any]] | None = None
        self.traffic: dict[int, tuple[float, float]] = {}
        self._pauses_s = 0.0
        self._first_step = 0
        self._loss = np.zeros(2)  # faded sum, faded count
        self._sums = np.zeros((0, _SUMS))
        self._end = np.zeros(0)  # Unix seconds; the end of each worker's newest step
        self._seen = np.zeros(0)  # when each worker was last heard of, on `clock`
        self._make_room(job.workers)

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event of `EVENTS`; those that change nothing here are ignored."""
        what, worker = event["event"], event.get("worker", -1)
        if what == "worker_joined":
            self.states[worker] = "joined"
        elif what == "worker_ready":
            self.states[worker], self.ready = "ready", event
            self.phases[worker] = event["phases"]
        elif what == "generation_started":
            self.workers = sorted({*self.workers, *event["members"]})
            self._make_room(self.workers[-1] + 1)
            self.generations += 1
        elif what == "traffic":
            self.traffic[worker] = (event["sent_bytes"], event["received_bytes"])
        elif what == "validated":
            self.validated = event
            self._pauses_s += event["seconds"]
        elif what == "checkpoint_saved":
            self.saved = (self.clock(), event)
        elif what == "worker_failed":
            self._leaves(worker, "failed")
        elif what == "run_finished":
            for one in self.workers:
                if self.states.get(one) in ("joined", "ready"):
                    self.states[one] = "done"
        elif what == "process_ended" and self.states.get(worker) != "failed":
            self._leaves(worker, f"exit {event['code']}" if event["code"] else "done")

    def _leaves(self, worker: int, state: str) -> None:
        self.states[worker] = state
        if state != "done" and 0 <= worker < len(self._sums):
            self._sums[worker] = 0

    def records(self, ledger: Records, steps: Records) -> None:
        """Take in new records, [any] of `LEDGER` and [any] of `STEPS`."""
        if len(ledger):
            self._first_step = self._first_step or int(ledger["step"].min())
            self.step = max(self.step, int(ledger["step"].max()))
            self.epoch = max(self.epoch, int(ledger["epoch"].max()))
            self.committed += int((ledger["stop"] - ledger["first"]).sum())
        if len(steps):
            self._make_room(int(steps["worker"].max()) + 1)
            self._follow_rates(steps)

    def _make_room(self, workers: int) -> None:
        missing = workers - len(self._sums)
        if missing > 0:
            self._sums = np.vstack([self._sums, np.zeros((missing, _SUMS))])
            self._end = np.append(self._end, np.full(missing, np.inf))
            self._seen = np.append(self._seen, np.full(missing, np.inf))
            self.workers = sorted({*self.workers, *range(workers - missing, workers)})

    def _follow_rates(self, steps: Records) -> None:
        worker, count = steps["worker"], len(self._sums)
        parts_s = {part: np.bincount(worker, steps[part], count) for part in _PARTS}
        busy_s = sum(parts_s.values())
        end = np.zeros(count)
        np.maximum.at(end, worker, steps["begin"] + sum(steps[part] for part in _PARTS))
        new = np.zeros((count, _SUMS))
        new[:, _STEPS] = np.bincount(worker, minlength=count)
        new[:, _SAMPLES] = np.bincount(worker, steps["samples"], count)
        new[:, _WORK] = parts_s["load_s"] + parts_s["forward_s"] + parts_s["backward_s"]
        new[:, _WAIT] = parts_s["wait_s"]
        # Time between steps counts, unless it is so long that it was a pause (a validation).
        new[:, _WALL] = np.clip(end - self._end, busy_s, 2 * busy_s)
        forget = np.minimum(new[:, _WALL] / MEMORY_S, new[:, _STEPS] / MEMORY_STEPS)
        self._sums = self._sums * np.exp(-forget)[:, None] + new
        heard = new[:, _STEPS] > 0
        self._end[heard], self._seen[heard] = end[heard], self.clock()
        self._follow_loss(steps["loss"], int(heard.sum()), float(np.exp(-forget[heard].mean())))

    def _follow_loss(self, losses: Records, workers: int, keep: float) -> None:
        if not math.isfinite(self._loss[0]):
            self._loss[:] = 0
        count = len(losses) / workers
        self._loss = self._loss * keep + (float(losses.mean()) * count, count)
        if self._loss[1] >= MEMORY_STEPS / 2:
            self.best = min(self.best, self.loss)

    @property
    def loss(self) -> float:
        """Mean of recent steps; NaN before the first."""
        return float(self._loss[0] / self._loss[1]) if self._loss[1] else math.nan

    @property
    def samples_per_s(self) -> float:
        """Of all workers together, over recent steps."""
        return sum(row.rate for row in self._every_row(self.clock()))

    @property
    def epochs(self) -> int | None:
        """Passes over the data that the job asks for; None where it counts steps."""
        train = self.job.train
        return None if train.steps else train.epochs or DEFAULT_EPOCHS

    @property
    def total(self) -> int | None:
        """Steps of the whole job; None until a worker has said how many samples there are."""
        if self.epochs is None or not self.ready:
            return self.job.train.steps
        samples = int(self.ready["samples"])
        return math.ceil(samples / self.job.train.global_batch) * self.epochs

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, validations included; None until it can be told."""
        steps, wall_s = self._sums[:, _STEPS].sum(), self._sums[:, _WALL].sum()
        if self.total is None or not steps:
            return None
        last = min(self.total, self.job.train.stop_after_steps or self.total)
        pause_s = self._pauses_s / max(self.step - self._first_step + 1, 1)
        return max(last - self.step, 0) * float(wall_s / steps + pause_s)

    def waiting_for(self) -> str:
        """What stands between now and the first step, in words."""
        absent = [w for w in self.workers if w not in self.states]
        if absent:
            return f"waiting for {_workers(absent)} to join"
        unready = [w for w in self.workers if self.states[w] == "joined"]
        if unready:
            return f"waiting for {_workers(unready)} to load the model and the data"
        return "waiting for the first step"

    def rows(self, most: int) -> tuple[list[Row], Row]:
        """What the table says.

        Returns:
            At most `most` rows: failed workers first, then those waited for,
            then the slowest; those that do not fit are one row. And a row of all.
        """
        rows = self._every_row(self.clock())
        whole = _together("all", rows)
        if len(rows) > most:
            rest = rows[most - 1 :]
            rows = [*rows[: most - 1], _together(f"{len(rest)} more", rest)]
        return rows, whole

    def _every_row(self, now: float) -> list[Row]:
        wall, samples, work = (self._sums[:, field] for field in (_WALL, _SAMPLES, _WORK))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate, wait = samples / wall, self._sums[:, _WAIT] / wall
            cost = np.where(samples, work / samples, np.nan)  # seconds of own work a sample
            known = cost[np.isfinite(cost)]  # of two workers, the faster one is the measure
            slowness = cost / np.quantile(known, 0.5, method="lower") if len(known) else cost
        share = samples / max(samples.sum(), 1)
        figures = np.nan_to_num(np.stack([rate, share, wait, slowness]), posinf=0.0)
        place = {"failed": 0, "starting": 1, "joined": 1}  # what is waited for comes early
        order = sorted(
            self.workers,
            key=lambda w: (place.get(self._state(w, 1, now), 2), -round(figures[3][w], 1), w),
        )
        return [
            Row(
                str(w),
                self._state(w, float(figures[3][w]), now),
                rate=float(figures[0][w]),
                share=float(figures[1][w]),
                wait=float(figures[2][w]),
                sent=self.traffic.get(w, (0, 0))[0],
                received=self.traffic.get(w, (0, 0))[1],
                note=_phases(self.phases.get(w, {})),
            )
            for w in order
        ]

    def _state(self, worker: int, slowness: float, now: float) -> str:
        state = self.states.get(worker, "starting")
        steps, _, _, _, wall_s = self._sums[worker]
        if not steps or state not in ("starting", "joined", "ready"):
            return state
        silent_s = now - self._seen[worker]
        if silent_s > max(QUIET_S, QUIET_STEPS * wall_s / steps):
            return f"quiet {_whole(silent_s)}"
        return f"slow {slowness:.1f}x" if slowness >= SLOW else "training"


def _together(name: str, rows: Sequence[Row]) -> Row:
    training = sum(row.state.startswith(("training", "slow")) for row in rows)
    waits = [row.wait for row in rows if row.rate]
    return Row(
        name,
        f"{training} training" if training else "",
        rate=sum(row.rate for row in rows),
        share=sum(row.share for row in rows),
        wait=sum(waits) / max(len(waits), 1),
        sent=sum(row.sent for row in rows),
        received=sum(row.received for row in rows),
    )


def _workers(numbers: Sequence[int], most: int = 4) -> str:
    named = ", ".join(str(n) for n in numbers[:most])
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"worker{'s' if len(numbers) > 1 else ''} {named}{rest}"


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def _phases(phases: dict[str, float]) -> str:
    return "  ".join(f"{name} {readable_seconds(s)}" for name, s in phases.items())


def _metrics(validated: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in validated["metrics"].items())


def _printable(text: str) -> str:
    """One line without control characters, whatever a user's error text holds."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _position(figures: Figures) -> str:
    epochs = f"/{figures.epochs}" if figures.epochs else ""
    total = f"/{readable_count(figures.total)}" if figures.total else ""
    return f"epoch {figures.epoch + 1}{epochs}  step {readable_count(figures.step)}{total}"


def _eta(figures: Figures) -> str:
    return f"eta {_whole(figures.eta_s)}" if figures.eta_s else ""


def _whole(seconds: float) -> str:
    """Seconds without decimals: a time that moves while one looks at it."""
    return f"{seconds:.0f} s" if seconds < 9.95 else readable_seconds(seconds)


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
        return f"worker {event['worker']} failed at step {event['step']} ({event['phase']})"
    if what == "stop_requested":
        return f"stopping at the next commit, asked by {event['by']}"
    if what == "generation_started" and generations > 1:
        members = _workers(event["members"])
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
    lines: list[Line] = [[(_heading(figures, width), "bold")], *top, []]
    lines += _table(figures, most_rows, width)
    lines += [[], [(_foot(figures, width), "dim")]]
    return [_cut(line, width) for line in lines][: max(height - 1, 1)]


def _heading(figures: Figures, width: int) -> str:
    job, ready = figures.job, figures.ready
    parts = [figures.name, _plural(job.workers, "worker"), job.sync.name]
    parts.append(f"batch {readable_count(job.train.global_batch)}")
    if ready:
        parts.append(_plural(ready["samples"], "sample"))
        parts.append(_plural(ready["parameters"], "parameter"))
    return _fit(parts, width)


def _plural(count: int, noun: str) -> str:
    return f"{readable_count(count)} {noun}{'' if count == 1 else 's'}"


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
        shown = _printable(text)[: max(width, 0)]
        width -= len(shown)
        kept.append((shown, style))
    return kept


def _starting(figures: Figures) -> list[Line]:
    known = len(figures.workers)
    joined = sum(worker in figures.states for worker in figures.workers)
    ready = sum(figures.states.get(worker) == "ready" for worker in figures.workers)
    elapsed = _whole(figures.clock() - figures.began)
    return [
        [("starting", "cyan"), (f"   {joined} of {known} joined, {ready} ready   {elapsed}", "")],
        [(figures.waiting_for(), "")],
    ]


def _training(figures: Figures, width: int, bar: str) -> list[Line]:
    loss = figures.loss
    line: Line = [("loss ", ""), (_number(loss), "bold" if math.isfinite(loss) else "bold red")]
    if math.isfinite(figures.best):
        line.append((f"   best {_number(figures.best)}", ""))
    checked = figures.validated
    found = f"{_metrics(checked)}   at step {readable_count(checked['step'])}" if checked else "-"
    return [_progress(figures, width, bar), line, [("validation  ", ""), (found, "")]]


def _progress(figures: Figures, width: int, bar: str) -> Line:
    position, total = _position(figures), figures.total
    if not total:
        return [(position, "")]
    done = min(figures.step / total, 1.0)
    tail = f"{math.floor(100 * done):3d} %  {_eta(figures):<10}"
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
    parts = [f"committed {_plural(figures.committed, 'sample')}"]
    if figures.saved:
        when, event = figures.saved
        ago = _whole(figures.clock() - when)
        parts.append(f"checkpoint at step {readable_count(event['step'])}, {ago} ago")
    else:
        parts.append("no checkpoint yet")
    parts.append(f"running {_whole(figures.clock() - figures.began)}")
    return _fit(parts, width)


class LiveTable:
    """A table that is redrawn in place; notices stay above it, whole, in the scroll-back."""

    def __init__(self, figures: Figures, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.segment import Segment, Segments
        from rich.text import Text

        # Segments, not a rich table: `screen` has done the layout, and a redraw must be cheap.
        self._segment, self._segments, self._text = Segment, Segments, Text
        self._figures = figures
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,  # standard output may be a pipe, and must stay whole
            redirect_stderr=stream is sys.stderr,
        )
        self._bar = "#-" if self._console.options.ascii_only else "━─"
        self._drawn = -math.inf
        self._closed = False

    def event(self, event: dict[str, Any]) -> None:
        """Take it in; a notice is printed above the table at once."""
        self._figures.event(event)
        said = notice(event, generations=self._figures.generations)
        if said:
            style = "red" if event["event"] == "worker_failed" else "yellow"
            self._console.print(self._text(_printable(said), style=style))

    def records(self, ledger: Records, steps: Records) -> None:
        """Take them in; drawn at the next tick that is due."""
        self._figures.records(ledger, steps)

    def tick(self, now: float) -> None:
        """Redraw, where the last time is half a second or longer ago."""
        if now - self._drawn >= REDRAW_S and not self._closed:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        lines = screen(self._figures, self._console.width, self._console.height, self._bar)
        pieces = []
        for number, line in enumerate(lines):
            if number:
                pieces.append(self._segment.line())
            for text, style in line:
                pieces.append(self._segment(text, self._console.get_style(style or "none")))
        self._live.start()
        self._live.update(self._segments(pieces), refresh=True)

    def close(self) -> None:
        """Leave the last state on the screen, and the cursor shown whatever happens."""
        if self._closed:
            return
        self._closed = True
        try:
            self._draw()
        finally:
            self._live.stop()


class PlainLines:
    """One line at a time, for logs and pipes: no colours, no control characters."""

    def __init__(self, figures: Figures, stream: TextIO) -> None:
        self._figures, self._stream = figures, stream
        self._said = figures.began
        self._said_step = 0

    def event(self, event: dict[str, Any]) -> None:
        """Say it, if it is worth a line."""
        self._figures.event(event)
        self._say(
            notice(event, generations=self._figures.generations)
            or self._milestone(event)
            or self._everybody(event)
        )

    def _milestone(self, event: dict[str, Any]) -> str | None:
        what, figures = event["event"], self._figures
        if what == "run_started":
            return _heading(figures, 1000)
        if what == "epoch_finished":
            epochs = f"/{figures.epochs}" if figures.epochs else ""
            return (
                f"epoch {event['epoch'] + 1}{epochs} finished  step {readable_count(event['step'])}"
                f"  loss {_number(event['loss'])}  {_plural(event['samples'], 'sample')}"
            )
        if what == "validated":
            return (
                f"validated  step {readable_count(event['step'])}  {_metrics(event)}"
                f"  in {readable_seconds(event['seconds'])}"
            )
        if what == "checkpoint_saved":
            return (
                f"checkpoint  step {readable_count(event['step'])}  {event['path']}"
                f"  {readable_bytes(event['size_bytes'])}"
                f"  training held {readable_seconds(event['held_s'])}"
            )
        return None

    def _everybody(self, event: dict[str, Any]) -> str | None:
        """The line that ends the start-up, with the last worker to be ready."""
        states, workers = self._figures.states, self._figures.workers
        if event["event"] != "worker_ready" or self._figures.step:
            return None
        if any(states.get(worker) != "ready" for worker in workers):
            return None
        waited_s = self._figures.clock() - self._figures.began
        return (
            f"ready in {readable_seconds(waited_s)}  {_plural(len(workers), 'worker')}"
            f" on {event['device']}  {_plural(event['parameters'], 'parameter')}"
            f"  {_plural(event['samples'], 'sample')}"
        )

    def records(self, ledger: Records, steps: Records) -> None:
        """Take them in; the next tick that is due says how far training is."""
        self._figures.records(ledger, steps)

    def tick(self, now: float) -> None:
        """Say how far training is: at the first step, then every few seconds."""
        first = self._figures.step > 0 and self._said_step == 0
        if first or now - self._said >= LINE_S:
            self._said = now
            self._progress()

    def _progress(self) -> None:
        figures = self._figures
        if not figures.step:
            elapsed = _whole(figures.clock() - figures.began)
            self._say(f"starting  {figures.waiting_for()}  {elapsed}")
        elif figures.step != self._said_step:
            self._said_step = figures.step
            rate = f"{readable_count(figures.samples_per_s)} samples/s"
            loss = f"loss {_number(figures.loss)}"
            self._say("  ".join(filter(None, (_position(figures), loss, rate, _eta(figures)))))

    def _say(self, text: str | None) -> None:
        if text:
            self._stream.write(f"{_printable(text)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Say where training stopped, unless that was said already."""
        if self._figures.step != self._said_step:
            self._progress()
