"""The trials of a search while it runs, as lines that are drawn again and again.

It reads what grows in the folders of runs, and nothing depends on it. Way in: `LiveTrials.lines`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from instep.events import LEDGER, LEDGER_START, NewEvents
from instep.plain_file import plain
from instep.search.results import best_of, name_of
from instep.search.search import Search
from instep.search.table import aligned, best_curve, counts_of, short, shown
from instep.units import readable_count, readable_seconds
from instep.words import short_number

BEST = 5
"""Trials that are over, in the table."""


class TrialSoFar:
    """A run in progress: its step, and its last validation.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._new = run, NewEvents(run)
        self.step = self.steps = 0
        """The last step, and all of the whole run; 0 until they are known."""
        self.metrics: Mapping[str, Any] = {}

    def update(self) -> None:
        """Read what is new."""
        with suppress(OSError, ValueError), open(self._run / "ledger.bin", "rb", opener=plain) as f:
            records = (os.fstat(f.fileno()).st_size - LEDGER_START) // LEDGER.itemsize
            if records > 0:
                f.seek(LEDGER_START + (records - 1) * LEDGER.itemsize)
                self.step = int(np.frombuffer(f.read(LEDGER.itemsize), LEDGER)["step"][0])
        for event in self._new.read():
            with suppress(LookupError):  # damaged: the run will say so
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "validated":
            self.metrics = event["metrics"]
        elif event["event"] == "worker_ready":
            self.steps = event.get("last_step") or self.steps


class LiveTrials:
    """The table of a search: its best trials, those that run, and how long it still takes."""

    def __init__(self) -> None:
        self._runs: dict[int, TrialSoFar] = {}
        self._began: tuple[float, int] | None = None  # time, and trials that were told by then

    def lines(self, search: Search, now: float | None = None) -> list[str]:
        """The table now.

        Args:
            search: that is conducted.
            now: seconds on a steady clock.
        """
        now = time.monotonic() if now is None else now
        if self._began is None:
            self._began = now, len(search.results)
        metric, keys = search.job.stop.metric, [*search.job.search.ranges]
        rows = [("trial", metric, "step", *map(short, keys), "state", "workers")]
        for place, number in enumerate(best_of(search.results, search.upwards, BEST)):
            values, result = search.results[number]
            state = "completed, best" if not place else "completed"
            figure = _figure(result.value)
            rows.append(self._row(number, figure, str(result.steps), values, keys, state, "-"))
        for number, workers in sorted(search.workers.items()):
            run = self._runs.setdefault(number, TrialSoFar(search.folder / name_of(number)))
            run.update()
            steps = f"/{readable_count(run.steps)}" if run.steps else ""
            state = "training" if run.step else "starting"
            step = f"{readable_count(run.step)}{steps}" if run.step else "-"
            values, figure = search.chosen[number][0], _figure(run.metrics.get(metric))
            rows.append(self._row(number, figure, step, values, keys, state, str(workers)))
        self._runs = {n: run for n, run in self._runs.items() if n in search.workers}
        used = sum(search.workers.values())
        told = f"told    {len(search.results)} of {search.trials}: {counts_of(search.results)}"
        lines = [
            *aligned(rows),
            f"{told}   workers {used} of {search.capacity}{self._ends(search, now)}",
        ]
        curve = best_curve(search.results, search.upwards)
        return [*lines, *([f"best    {curve}"] if curve else [])]

    def _row(
        self,
        number: int,
        figure: str,
        step: str,
        values: Mapping[str, Any],
        keys: list[str],
        state: str,
        workers: str,
    ) -> tuple[str, ...]:
        return (name_of(number), figure, step, *(shown(values[k]) for k in keys), state, workers)

    def _ends(self, search: Search, now: float) -> str:
        """When it ends at the pace of this session; empty until it has one."""
        began, before = self._began or (now, 0)
        told = len(search.results) - before
        left = search.trials - len(search.results)
        if told < 1 or now <= began or not left:
            return ""
        left_s = (now - began) / told * left
        return f"   ends in about {readable_seconds(left_s)}"


def _figure(value: Any) -> str:
    return short_number(float(value)) if isinstance(value, int | float) else "-"
