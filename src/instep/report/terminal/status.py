"""Where runs are: one run as the live table shows it, or a line for each run of a folder.

Both read what runs recorded, and need nothing of their processes. Way in: `Status`, `states_of`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instep.errors import RunError
from instep.report.figures.progress import MEMORY_S, Progress
from instep.report.figures.summary import finite
from instep.report.terminal.choice import BestValidation, RunChoice
from instep.report.terminal.screen import screen
from instep.store.folder import is_running
from instep.store.run_files import step_ends
from instep.store.run_folder import RunFolder
from instep.units import readable_count, readable_seconds
from instep.words import command, metrics_in_words

_RECENT_S, _BEAT_S = 3 * MEMORY_S, 0.5
"""The last steps are taken in one beat after another, as a view of the running job gets them."""


class Status:
    """A run, read now.

    Args:
        path: its folder.

    Raises:
        RunError: it is not the folder of a run.
    """

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.state = "running" if is_running(path) else self.folder.outcome
        """`running`; else how it ended, or `unfinished` if it was killed."""
        running = self.state == "running"
        self.progress = _replayed(self.folder, time.time() if running else None)
        self.progress.over = not running

    def lines(self, width: int = 100, encoding: str = "utf-8") -> list[str]:
        """As the live table, and the state; with characters that the encoding has."""
        bar = "━─" if encoding.lower().startswith("utf") else "#-"
        drawn = screen(self.progress, width, 50, bar)
        shown = ["".join(text for text, _ in line) for line in drawn]
        first = [f"{self.state}   {self.folder.path}"]
        if why := self.folder.ending.get("why"):
            first.append(f"why     {why}")
        return [*first, *(line.rstrip() for line in shown)]

    def next_commands(self) -> list[str]:
        """What one can do with a run that is in this state."""
        path, logs = self.folder.path, command("logs", self.folder.path)
        if self.state == "running":
            scale = [] if self.folder.joined else [command("scale", path, "--workers N")]
            return [f"{logs} --follow", *scale]
        if self.state == "completed":
            export = command("export", path, "--to model.safetensors")
            there = (path / "model.safetensors").exists()
            return [command("report", path), *([export] if there else [])]
        return [self.folder.to_resume, logs] if self.folder.last_step > 0 else [logs]

    def as_table(self) -> dict[str, Any]:
        """Plain data; what is not known is None."""
        progress, (rows, _) = self.progress, self.progress.rows(1 << 20)
        table: dict[str, Any] = finite(
            {
                "run": str(self.folder.path),
                "state": self.state,
                "step": self.folder.last_step,
                "steps": progress.total,
                "training_loss": progress.loss,
                "validation": progress.validated.get("metrics"),
                "samples_per_s": progress.samples_per_s,
                "eta_s": progress.eta_s if self.state == "running" else None,
                "workers": {row.name: row.state for row in rows},
            }
        )
        return table


class State(NamedTuple):
    """A run of several."""

    name: str
    state: str
    began: float | None
    """Unix seconds."""
    seconds: float
    workers: int
    step: int
    steps: int | None
    validation: dict[str, Any]
    best: BestValidation | None = None
    """Best validation, of the metric that was asked for."""

    def as_table(self) -> dict[str, Any]:
        """Plain data."""
        best = None if self.best is None else self.best._asdict()
        return {**self._asdict(), "best": best}


def states_of(runs: Path, choice: RunChoice | None = None) -> tuple[list[State], list[str]]:
    """Runs in a folder that are chosen, and what cannot be read, in words.

    The oldest comes first, or the best of the metric of the choice; then runs that did not measure
    it are left out.

    Raises:
        RunError: there is no such folder, or no run in it.
        SpecError: no run has what the choice asks for.
    """
    choice = choice or RunChoice()
    if not runs.is_dir():
        raise RunError(f"there is no folder {runs}. Give the folder that has the run folders.")
    if (runs / "job.toml").is_file():
        raise RunError(f"{runs} is a run itself: instep status {runs}")
    paths = sorted(each.parent for each in runs.glob("*/job.toml"))
    if not paths:
        raise RunError(f"there is no run in {runs}. `instep run JOB --runs {runs}` makes one.")
    found, unread = list[State](), list[str]()
    for path in paths:
        try:
            if (state := _state_of(path, choice)) is not None:
                found.append(state)
        except RunError as error:
            unread.append(str(error))
    choice.check(len(found))
    found.sort(key=lambda each: each.began or 0.0)
    if choice.metric:
        measured = [(each.best, each) for each in found if each.best is not None]
        found = [each for _, each in sorted(measured, key=lambda pair: choice.order(pair[0]))]
    return found, unread


def _state_of(path: Path, choice: RunChoice) -> State | None:
    folder = RunFolder(path)
    state = "running" if is_running(path) else folder.outcome
    sessions = folder.times.sessions
    listed = State(
        path.name,
        state,
        sessions[0][0] if sessions else None,
        folder.times.seconds,
        folder.members.team,
        folder.last_step,
        folder.plan.steps,
        folder.last("validated").get("metrics") or {},
        choice.best_of(folder),
    )
    return listed if choice.takes(folder, listed._asdict()) else None


def state_lines(states: Sequence[State], metric: str = "") -> list[str]:
    """A table of runs, with the best of a metric if there is one."""
    heads = ("run", "state", "began", "took", "workers", "step", "validation")
    rows = [(*heads, *([f"best {metric}"] if metric else []))]
    for each in states:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.began)) if each.began else "-"
        steps = f"/{readable_count(each.steps)}" if each.steps else ""
        rows.append(
            (
                each.name,
                each.state,
                began,
                readable_seconds(each.seconds),
                readable_count(each.workers),
                readable_count(each.step) + steps,
                metrics_in_words({"metrics": each.validation}) or "-",
                *([f"{each.best.value:.4g} at step {each.best.step}"] if each.best else []),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _replayed(folder: RunFolder, now: float | None) -> Progress:
    """What a view would have shown by now, or at the end."""
    session = folder.times.sessions[-1:] or [(0.0, 0.0)]
    clock = [session[0][0]]
    progress = Progress(folder.spec, folder.path.name, lambda: clock[0])
    for event in folder.events:
        clock[0] = float(event["time"])
        progress.event(event)
    for at, steps in _in_beats(folder):
        clock[0] = at
        progress.records(folder.ledger[:0], steps)
    progress.records(folder.committed, folder.steps[:0])
    clock[0] = session[0][1] if now is None else now
    return progress


def _in_beats(folder: RunFolder) -> Iterator[tuple[float, np.ndarray[Any, np.dtype[Any]]]]:
    """When steps ended, and they: all but the recent ones at once."""
    ends = step_ends(folder.steps)
    if not len(ends):
        return
    beats = np.maximum(np.floor((ends - ends.max() + _RECENT_S) / _BEAT_S), 0)
    for beat in np.unique(beats):
        chosen = beats == beat
        yield float(ends[chosen].max()), folder.steps[chosen]
