"""Where runs are: one run as the live table shows it, or a line for each run of a folder.

Both read what runs recorded, and need nothing of their processes. Ways in: `Status`, `states_of`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instep.errors import RunError
from instep.events import LEDGER
from instep.report.figures.progress import MEMORY_S, Progress, Row
from instep.report.figures.summary import finite
from instep.report.terminal.choice import BestValidation, RunChoice
from instep.report.terminal.screen import screen
from instep.store.folder import is_running
from instep.store.run_files import Event, Records, step_ends
from instep.store.run_folder import RunFolder
from instep.units import readable_count, readable_seconds
from instep.words import command, metrics_in_words

_RECENT_S, _BEAT_S = 3 * MEMORY_S, 0.5
_NO_LEDGER = np.zeros(0, LEDGER)
_CHANGES = ("run_started", "generation_started", "worker_failed", "process_ended")


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
        if not self.folder.saved_step:
            self.progress.saved = None  # they were removed

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
        run = self.folder
        return next_commands(run.path, self.state, run.last_step, run.to_resume, run.joined)

    def as_table(self) -> dict[str, Any]:
        """Plain data; what is not known is None."""
        return status_table(self.progress, self.folder.path, self.state, self.folder.last_step)


EVERY = 1 << 20
"""More rows than there are workers."""


def status_table(
    progress: Progress,
    path: Path,
    state: str,
    step: int,
    known: tuple[list[Row], Row] | None = None,
) -> dict[str, Any]:
    """Figures of a run in a state, up to its last committed step; what is not known is None.

    Args:
        known: the rows of all workers, where they have been made before.
    """
    rows, whole = known or progress.rows(EVERY)
    table: dict[str, Any] = finite(
        {
            "run": str(path),
            "state": state,
            "step": step,
            "steps": progress.total,
            "training_loss": progress.loss,
            "validation": progress.validated.get("metrics"),
            "samples_per_s": whole.rate,
            "eta_s": progress.eta_s if state == "running" else None,
            "workers": {row.name: row.state for row in rows},
        }
    )
    return table


def next_commands(path: Path, state: str, step: int, to_resume: str, joined: bool) -> list[str]:
    """Commands for a run that is in this state, after so many steps."""
    logs = command("logs", path)
    if state == "running":
        return [f"{logs} --follow", *([] if joined else [command("scale", path, "--workers N")])]
    if state == "completed":
        export = command("export", path, "--to model.safetensors")
        there = (path / "model.safetensors").exists()
        return [command("report", path), *([export] if there else [])]
    return [to_resume, logs] if step > 0 else [logs]


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
            folder = RunFolder(path)
            state = _state_of(folder, choice.best_of(folder))
            if choice.takes(folder, state._asdict()):
                found.append(state)
        except RunError as error:
            unread.append(str(error))
    choice.check(len(found))
    found.sort(key=lambda each: each.began or 0.0)
    if choice.metric:
        measured = [(each.best, each) for each in found if each.best is not None]
        found = [each for _, each in sorted(measured, key=lambda pair: choice.order(pair[0]))]
    return found, unread


def state_of(path: Path) -> State:
    """Look at one run.

    Raises:
        RunError: it cannot be read.
    """
    return _state_of(RunFolder(path))


def _state_of(folder: RunFolder, best: BestValidation | None = None) -> State:
    sessions = folder.times.sessions
    return State(
        folder.path.name,
        "running" if is_running(folder.path) else folder.outcome,
        sessions[0][0] if sessions else None,
        folder.times.seconds,
        folder.members.team,
        folder.last_step,
        folder.plan.steps,
        folder.last("validated").get("metrics") or {},
        best,
    )


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
    begin, end = folder.times.sessions[-1] if folder.times.sessions else (0.0, 0.0)
    progress = Progress(folder.spec, folder.path.name, partial(float, begin))
    follow(progress, folder.events, folder.steps)
    progress.records(folder.committed, folder.steps[:0])
    progress.clock = partial(float, end if now is None else now)
    return progress


def follow(
    progress: Progress, events: Sequence[Event], steps: Records, *, then: bool = True
) -> None:
    """Let figures follow what happened in the order of time, as they would have during the run.

    Recent steps come one beat after another, and what is older at once, but what was before a
    change of the members comes before it.

    Args:
        progress: the figures.
        events: oldest first.
        steps: [any] of `STEPS`, in any order.
        then: whether its clock shows the time of each meanwhile, in Unix seconds.
    """
    clock = progress.clock
    for at, event, some in _in_order(events, steps):
        if then:
            progress.clock = partial(float, at)
        if event:
            progress.event(event)
        else:
            progress.records(_NO_LEDGER, some)
    progress.clock = clock


def _in_order(events: Sequence[Event], steps: Records) -> Iterator[tuple[float, Event, Records]]:
    times = np.maximum.accumulate([float(event["time"]) for event in events] or [0.0])
    ends = step_ends(steps)
    changes = [at for at, event in zip(times, events, strict=False) if event["event"] in _CHANGES]
    beats = np.maximum(np.floor((ends - ends.max(initial=0.0) + _RECENT_S) / _BEAT_S), 0)
    before = np.searchsorted(changes, ends, side="right")
    order = np.lexsort((beats, before))
    cuts = np.flatnonzero(np.diff(beats[order]) + np.diff(before[order])) + 1
    pieces = [each for each in np.split(order, cuts) if len(each)]
    yield from heapq.merge(
        ((at, event, steps[:0]) for at, event in zip(times.tolist(), events, strict=False)),
        ((float(ends[each].max()), {}, steps[each]) for each in pieces),
        key=lambda each: each[0],
    )
