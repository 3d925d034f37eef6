"""A run that trains, read as it grows: nothing is read twice, and memory does not grow with it.

`Progress` computes the figures of the terminal's live table; curves are folded (`fold.py`). Of a
long run some records are shown before all are read (`early.py`). Where the run goes back, or a file
was replaced, all is read again. Way in: `LiveRun`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from instep.checksums import table_of
from instep.dashboard.early import AT_THE_END, EarlySteps
from instep.dashboard.fold import PointsSoFar
from instep.dashboard.logs import LogEnds
from instep.dashboard.so_far import LedgerSoFar, StepsSoFar, TimesSoFar
from instep.errors import RunError, SpecError
from instep.events import LEDGER, LEDGER_START, STEPS
from instep.growing_file import Rewritten, Tail, size_of
from instep.job.file import build
from instep.report.figures.progress import Progress, Row
from instep.report.terminal.status import EVERY, follow, status_table
from instep.store.run_files import (
    Event,
    Records,
    check_steps,
    existing,
    job_of,
    returns_in,
    with_possible_times,
    without_discarded,
)
from instep.store.run_folder import WINDOW, RunPlan
from instep.store.run_members import RunMembers
from instep.store.run_traffic import TrafficCounter
from instep.vocabulary import wrong_in

_LEDGER_S = 0.15
"""So long is a ledger read in one look, so that a long one does not keep the curves waiting."""
_MOST_TIMES, _MOST_RECENT = 512, 1 << 16
Made = TypeVar("Made")

_FREQUENT = ("traffic", "logged", "trial_progress", "participants_apart", "lag_measured")
"""Events of which there may be many, and of which only figures are kept."""


class LiveRun:
    """A run as far as it has written.

    Args:
        path: its folder.
        clock: Unix seconds.
        figures: whether those of the live table and the audit are wanted too, or only curves.

    Raises:
        RunError: it is not the folder of a run, or it is damaged.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, *, figures: bool = True
    ) -> None:
        self._figures = figures
        self.path, self._clock, self.logs = existing(path), clock, LogEnds(path)
        self._begin()

    def _begin(self) -> None:
        path = self.path
        self._job_file = self._job_key()
        try:
            self.job = job_of(path)
            self.spec = build(self.job, source=str(path / "job.toml"))
        except SpecError as error:
            raise RunError(f"{path} cannot be read as a run: {error}") from None
        self._events_tail = Tail(path / "events.jsonl")
        self._steps_tail = Tail(path / "steps.bin", STEPS.itemsize)
        self._early: EarlySteps | None = None
        self._ledger_tail = Tail(path / "ledger.bin", LEDGER.itemsize, LEDGER_START)
        self._kept: list[Event] = []
        self._made: dict[str, Any] = {}
        self._returns = 0
        self.logged: dict[str, PointsSoFar] = {}
        """Values that callbacks have logged, by name."""
        self.traffic = TrafficCounter(_MOST_TIMES)
        self.steps, self.ledger = StepsSoFar(), LedgerSoFar(self.spec, check=self._figures)
        self.times = TimesSoFar()
        self._now = self._clock()
        self.workers: list[Row] = []
        """A row for each, as of the last `status`."""
        self.is_behind = False
        """Whether there is more of the ledger than was read."""
        if self._figures:
            self.progress = Progress(self.spec, self.path.name, lambda: self._now)
        self._caught_up = False

    def _job_key(self) -> tuple[int, int, int]:
        about = (self.path / "job.toml").stat()
        return about.st_size, about.st_mtime_ns, about.st_ino

    def look(self) -> bool:
        """Read what is new; whether there was anything.

        Raises:
            RunError: a file is damaged, or cannot be read.
        """
        try:
            try:
                return self._look()
            except Rewritten:
                self._begin()
                return self._look()
        except (Rewritten, OSError) as error:
            raise RunError(f"{self.path} cannot be read: {error or 'it changes'}.") from None

    def _look(self) -> bool:
        if self._job_key() != self._job_file:
            raise Rewritten  # it was resumed with other settings, or is another run
        events = self._new_events()
        if not self._caught_up:
            self._catch_up(events)
            return True
        if len(returns_in(self._kept)) != self._returns:
            raise Rewritten  # steps that were read do not count any more
        self._now = self._clock()
        steps, ledger = self._new_steps(), self._new_ledger()
        if self._figures:
            follow(self.progress, events, steps)
            self.progress.records(ledger, steps[:0])
        return bool(events or len(steps) or len(ledger) or self._reads_early())

    def _new_events(self) -> list[Event]:
        found: list[Event] = []
        while lines := self._events_tail.new():
            for line in lines.splitlines():
                try:
                    event = table_of(line)
                    wrong = wrong_in(event)
                except (ValueError, RecursionError) as error:
                    wrong = str(error)
                if wrong:
                    raise RunError(f"{self.path / 'events.jsonl'} is damaged: {wrong}.")
                found.append(event)
                self._take(event)
        return found

    def _take(self, event: Event) -> None:
        self.traffic.take(event)
        what, at = event["event"], float(event["time"])
        if what == "run_started":
            self.times.start(at)
        self.times.reach(at)
        if what == "logged":
            for name, value in event["values"].items():
                number = float(value) if isinstance(value, int | float) else np.nan
                self.logged.setdefault(name, PointsSoFar()).add(event["step"], number, at)
        if what not in _FREQUENT:
            self._kept.append(event)
            self._made.clear()
        if what in ("worker_ready", "data_divided"):
            self.ledger.know(self.last("worker_ready"), self.last("data_divided"))

    def _new_steps(self) -> Records:
        found = np.concatenate([np.zeros(0, STEPS), *self._pieces_of_steps()])
        return with_possible_times(found)

    def _pieces_of_steps(self) -> Any:
        while data := self._steps_tail.new():
            records = np.frombuffer(data, STEPS)
            check_steps(records, self.path / "steps.bin")
            yield self._counted(records)

    def _counted(self, records: Records) -> Records:
        counted = self.steps.take(records)
        if self._early is not None:
            self._early.take(records)
        self.times.reach(self.steps.end)
        return counted

    def _reads_early(self) -> bool:
        """Read on what a long run had when it was opened; whether there was anything."""
        if self._early is None:
            return False
        self._early.read()
        if self._early.steps is not None:
            self.steps, self._early = self._early.steps, None
        return True

    @property
    def share_read(self) -> float:
        """How much of the records of steps the curves are made of, 0 to 1."""
        return 1.0 if self._early is None else self._early.share

    def _new_ledger(self) -> Records:
        """Read what is new, of a long one for so long; the end of it says how far the run is."""
        newest, until = np.zeros(0, LEDGER), time.monotonic() + _LEDGER_S
        self.is_behind = False
        while data := self._ledger_tail.new():
            newest = np.frombuffer(data, LEDGER)
            self.ledger.take(newest)
            self.is_behind = time.monotonic() > until
            if self.is_behind:
                break
        if self.is_behind and self.ledger.is_fixed:
            file, size = self.path / "ledger.bin", LEDGER.itemsize
            count = (size_of(file) - LEDGER_START) // size
            begin = LEDGER_START + max(0, count - WINDOW) * size
            newest = np.frombuffer(Tail(file, size, begin).new(), LEDGER)
            self.ledger.look_ahead(newest, count)
        return newest

    def _catch_up(self, events: list[Event]) -> None:
        """Read a run from its beginning."""
        returns = returns_in(self._kept)
        self._returns = len(returns)
        discards = [(float(e["time"]), step) for e, step in returns]
        session_of = self.times.session_of if self._figures else None
        self.steps, recent = StepsSoFar(discards, session_of), list[Records]()
        early = EarlySteps(self.path / "steps.bin", discards, session_of)
        if early.is_long:
            recent.append(self._counted(early.some())[-AT_THE_END:])
            self._steps_tail = Tail(self.path / "steps.bin", STEPS.itemsize, early.end)
            self._early = early
        for piece in self._pieces_of_steps():
            recent.append(piece)
            if len(recent) > 4 and sum(map(len, recent)) > _MOST_RECENT:
                del recent[0]
        ledger = self._new_ledger()
        self._caught_up = True
        if self._figures:
            self._replay(events, recent, ledger)

    def _replay(self, events: list[Event], recent: list[Records], ledger: Records) -> None:
        """Let `Progress` follow the end of a run step by step."""
        steps = np.concatenate([np.zeros(0, STEPS), *recent])[-4 * _MOST_RECENT :]
        steps = with_possible_times(steps)
        self._now = self.times.begin or self._clock()
        progress = Progress(self.spec, self.path.name, lambda: self._now)
        follow(progress, without_discarded(events), steps)
        progress.records(ledger[ledger["step"] <= self.last_step], steps[:0])
        self._now, self.progress = self._clock(), progress

    def last(self, name: str) -> Event:
        """The newest event of one name; an empty dict if there is none."""
        return next((e for e in reversed(self._kept) if e["event"] == name), {})

    @property
    def plan(self) -> RunPlan:
        """The steps that it is to take."""
        return self.ledger.plan

    @property
    def joined(self) -> bool:
        """Whether its processes called `instep.join`."""
        return bool(self.last("run_started").get("started_by") == "join")

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """Give what follows from events alone: made when it is first asked for, and again when
        another event has come."""
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    @property
    def events(self) -> list[Event]:
        """Events that count, oldest first, without those of which there are many."""
        return self.once("events", lambda: without_discarded(self._kept))

    @property
    def members(self) -> RunMembers:
        """Workers and servers."""
        none = np.zeros(0, STEPS), np.zeros(0, LEDGER)
        return self.once("members", lambda: RunMembers(self.events, *none, self.spec.workers))

    @property
    def last_step(self) -> int:
        """The last committed step."""
        return max(int(self.ending.get("step") or 0), self.ledger.reached)

    @property
    def ending(self) -> Event:
        """How the latest session ended; empty while it has not."""
        ends = [e for e in self._kept if e["event"] in ("run_started", "run_finished")]
        return ends[-1] if ends and ends[-1]["event"] == "run_finished" else {}

    def status(self, state: str) -> dict[str, Any]:
        """Give what `instep status --json` prints of it now."""
        progress = self.progress
        progress.over = state != "running"
        self._now = self._clock() if state == "running" else self.times.end
        known = progress.rows(EVERY)
        self.workers = known[0]
        return status_table(progress, self.path, state, self.last_step, known)

    def named(self, name: str) -> list[Event]:
        """Events of one name that count, oldest first."""
        return [each for each in self.events if each["event"] == name]
