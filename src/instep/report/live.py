"""What a person sees while a run goes on: a calm table, or plain lines.

A view is told everything (each event, each new record) and says little: the
table redraws twice a second at most, the lines come every few seconds. What
is shown lives in `figures.py`, how it is laid out in `screen.py`. No view
decides, waits or fails a run, and none explains a failure: whoever runs the
job prints the cause at the end.

The way in is `make_view`. `rich` is imported only where the table is drawn.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from instep.report.figures import Figures, Records
from instep.report.screen import eta, heading, notice, progress_words, screen
from instep.spec import JobSpec
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds
from instep.words import (
    metrics_in_words,
    of_what,
    plural,
    printable,
    short_number,
    whole_seconds,
)

REDRAW_S, LINE_S = 0.5, 5.0


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
    so_far: RunFolder | None = None,
    earlier: tuple[Records, Records] | None = None,
) -> View:
    """A live table where `stream` is a terminal that can draw one, plain lines elsewhere.

    Args:
        job: the job as run; gives the length of the run.
        run: its folder, whose name heads the view.
        stream: where to write; standard error where none is given.
        json: plain lines in any case.
        clock: seconds, from any origin; `tick` is given times of the same clock.
        so_far: what has happened already, to somebody else's eyes.
        earlier: steps of earlier sessions and their losses, as `Figures` takes them.
    """
    stream = sys.stderr if stream is None else stream
    figures = Figures(job, run.name, clock, earlier)
    if so_far is not None:
        for event in so_far.events:
            figures.event(event)
        figures.records(so_far.ledger, so_far.steps)
    if json or not stream.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return PlainLines(figures, stream)
    return LiveTable(figures, stream)


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
            self._console.print(self._text(printable(said), style=style))

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
            return heading(figures, 1000)
        if what == "epoch_finished":
            epochs = f"/{figures.epochs}" if figures.epochs else ""
            return (
                f"epoch {event['epoch'] + 1}{epochs} finished  step {readable_count(event['step'])}"
                f"  training loss {short_number(event['loss'])} ({of_what(None)})"
                f"  {plural(event['samples'], 'sample')}"
            )
        if what == "validated":
            return (
                f"validated  step {readable_count(event['step'])}  {metrics_in_words(event)}"
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
            f"ready in {readable_seconds(waited_s)}  {plural(len(workers), 'worker')}"
            f" on {event['device']}  {plural(event['parameters'], 'parameter')}"
            f"  {plural(event['samples'], 'sample')}"
        )

    def records(self, ledger: Records, steps: Records) -> None:
        """Take them in; the next tick that is due says how far training is."""
        self._figures.records(ledger, steps)

    def tick(self, now: float) -> None:
        """Say how far training is: at the first step, then every few seconds."""
        first = self._figures.steps_seen and self._said_step == 0
        if first or now - self._said >= LINE_S:
            self._said = now
            self._progress()

    def _progress(self) -> None:
        figures = self._figures
        if not figures.steps_seen:
            elapsed = whole_seconds(figures.clock() - figures.began)
            self._say(f"starting  {figures.waiting_for()}  {elapsed}")
        elif figures.step != self._said_step:
            self._said_step = figures.step
            rate = f"{readable_count(figures.samples_per_s)} samples/s"
            loss = f"training loss {short_number(figures.loss)}"
            self._say("  ".join(filter(None, (progress_words(figures), loss, rate, eta(figures)))))

    def _say(self, text: str | None) -> None:
        if text:
            self._stream.write(f"{printable(text)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Say where training stopped, unless that was said already."""
        if self._figures.step != self._said_step:
            self._progress()
