"""What a person sees during a run: a live table, or plain lines.

A view gets every event and every new record and prints little: the table redraws at
most twice a second, a line comes every few seconds. `figures/progress.py` computes what
is shown, `screen.py` lays it out. A view never decides, waits or fails a run, and does
not explain a failure: the client prints the cause at the end.

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

from instep.job.spec import JobSpec
from instep.report.figures.progress import Progress
from instep.report.terminal.screen import (
    eta,
    heading,
    logged_words,
    notice,
    progress_words,
    screen,
    waiting_for,
)
from instep.report.terminal.status import follow
from instep.store.run_files import Records
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds
from instep.words import (
    members,
    metrics_in_words,
    of_what,
    plural,
    printable,
    short_number,
    whole_seconds,
)

REDRAW_S, LINE_S = 0.5, 5.0


class View(Protocol):
    """Shows a run. `now` and the view's own clock are the same clock."""

    def event(self, event: dict[str, Any]) -> None:
        """One event, as it was written to `events.jsonl`."""

    def records(self, ledger: Records, steps: Records) -> None:
        """New records, [any] of `LEDGER` and [any] of `STEPS`, of any workers and steps."""

    def tick(self, now: float) -> None:
        """Time has passed (seconds); called a few times a second."""

    def close(self) -> None:
        """Print the final state and restore the terminal; a second call does nothing."""


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
    """A live table if `stream` is a terminal that can draw one, else plain lines.

    Args:
        job: the job as run; gives the length of the run.
        run: its folder, whose name heads the view.
        stream: where to write; standard error by default.
        json: plain lines in any case.
        clock: seconds, from any origin; `tick` is given times of the same clock.
        so_far: what happened before this view began (it replaces a lost one).
        earlier: steps of earlier sessions and their losses, as `Progress` takes them.
    """
    stream = sys.stderr if stream is None else stream
    progress = Progress(job, run.name, clock, earlier)
    if so_far is not None:
        follow(progress, so_far.events, so_far.steps, then=False)
        progress.records(so_far.ledger, so_far.steps[:0])
    if json or not stream.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return PlainLines(progress, stream)
    return LiveTable(progress, stream)


class LiveTable:
    """A table that is redrawn in place; notices stay above it, in full, in the scroll-back."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.segment import Segment, Segments
        from rich.text import Text

        # Segments, not a rich table: `screen` did the layout already, and a redraw must be cheap.
        self._segment, self._segments, self._text = Segment, Segments, Text
        self._progress = progress
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,  # standard output may be a pipe, which must get every byte
            redirect_stderr=stream is sys.stderr,
        )
        self._bar = "#-" if self._console.options.ascii_only else "━─"
        self._drawn = -math.inf
        self._closed = False

    def event(self, event: dict[str, Any]) -> None:
        """Take in an event; a notice is printed above the table at once."""
        self._progress.event(event)
        said = notice(event, generations=self._progress.generations, servers=self._progress.servers)
        if said:
            style = "red" if event["event"] == "worker_failed" else "yellow"
            self._console.print(self._text(printable(said), style=style))

    def records(self, ledger: Records, steps: Records) -> None:
        """Take in records; they are drawn at the next tick."""
        self._progress.records(ledger, steps)

    def tick(self, now: float) -> None:
        """Redraw if the last redraw was half a second ago or longer."""
        if now - self._drawn >= REDRAW_S and not self._closed:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        lines = screen(self._progress, self._console.width, self._console.height, self._bar)
        pieces = []
        for number, line in enumerate(lines):
            if number:
                pieces.append(self._segment.line())
            for text, style in line:
                pieces.append(self._segment(text, self._console.get_style(style or "none")))
        if self._closed:  # a blank line before what the client prints
            pieces.append(self._segment.line())
        self._live.start()
        self._live.update(self._segments(pieces), refresh=True)

    def close(self) -> None:
        """Leave the final state on the screen, and always show the cursor again."""
        if self._closed:
            return
        self._closed = self._progress.over = True
        try:
            self._draw()
        finally:
            self._live.stop()


class PlainLines:
    """One line at a time, for logs and pipes: no colours, no control characters."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress, self._stream = progress, stream
        self._said = progress.began
        self._said_step = 0

    def event(self, event: dict[str, Any]) -> None:
        """Print a line, if the event deserves one."""
        self._progress.event(event)
        self._say(
            notice(event, generations=self._progress.generations, servers=self._progress.servers)
            or self._milestone(event)
            or self._ready_line(event)
        )

    def _milestone(self, event: dict[str, Any]) -> str | None:
        what, progress = event["event"], self._progress
        if what == "run_started":
            return heading(progress, 1000)
        if what == "epoch_finished":
            epochs = f"/{progress.epochs}" if progress.epochs else ""
            return (
                f"epoch {event['epoch'] + 1}{epochs} finished  step {readable_count(event['step'])}"
                + (
                    ""
                    if progress.job.privacy.on
                    else f"  training loss {short_number(event['loss'])} ({of_what(None)})"
                    f"  {plural(event['samples'], 'sample')}"
                )
            )
        if what == "validated":
            took = event["seconds"]  # 0 where it is not known: of an own loop's own evaluation
            return f"validated  step {readable_count(event['step'])}  {metrics_in_words(event)}" + (
                f"  in {readable_seconds(took)}" if took else ""
            )
        if what == "checkpoint_saved":
            return (
                f"checkpoint  step {readable_count(event['step'])}  {event['path']}"
                f"  {readable_bytes(event['size_bytes'])}"
                f"  training paused {readable_seconds(event['held_s'])}"
            )
        if what == "checkpoint_copied":
            took = f"{readable_bytes(event['size_bytes'])}  in {readable_seconds(event['seconds'])}"
            return f"copied  step {readable_count(event['step'])}  {event['url']}  {took}"
        if what == "copies_resumed":
            return f"copies  {event['url']} again, after {readable_seconds(event['seconds'])}"
        return None

    def _ready_line(self, event: dict[str, Any]) -> str | None:
        """The line that ends the start-up, when the last worker is ready."""
        states, workers = self._progress.states, self._progress.workers
        if event["event"] != "worker_ready" or self._progress.step:
            return None
        if any(states.get(worker) != "ready" for worker in workers):
            return None
        waited_s = self._progress.clock() - self._progress.began
        at_work = len({*workers} - self._progress.servers)
        return (
            f"ready in {readable_seconds(waited_s)}  {members(at_work, len(workers) - at_work)}"
            f" on {event['device']}  {plural(event['parameters'], 'parameter')}"
            f"  {plural(event['samples'], 'sample')}"
        )

    def records(self, ledger: Records, steps: Records) -> None:
        """Take in records; the next line says how far training is."""
        self._progress.records(ledger, steps)

    def tick(self, now: float) -> None:
        """Print how far training is: at the first step, then every few seconds."""
        first = self._progress.steps_seen and self._said_step == 0
        if first or now - self._said >= LINE_S:
            self._said = now
            self._say_progress()

    def _say_progress(self) -> None:
        progress = self._progress
        if not progress.steps_seen and "failed" in progress.states.values():
            return
        if not progress.steps_seen:
            elapsed = whole_seconds(progress.clock() - progress.began)
            self._say(f"starting  {waiting_for(progress)}  {elapsed}")
        elif progress.step != self._said_step:
            self._said_step = progress.step
            rate = f"{readable_count(progress.samples_per_s)} samples/s"
            private = progress.job.privacy.on
            loss = "" if private else f"training loss {short_number(progress.loss)}"
            words, left = progress_words(progress), eta(progress)
            self._say(
                "  ".join(filter(None, (words, loss, logged_words(progress, 200), rate, left)))
            )

    def _say(self, text: str | None) -> None:
        if text:
            self._stream.write(f"{printable(text)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Print where training stopped, unless that was printed already."""
        self._progress.over = True
        if self._progress.steps_seen and self._progress.step != self._said_step:
            self._say_progress()
