"""The runs of a folder, a row for each: what `instep list --json` has, and the best of each metric.

A run that has ended is read once, and again only when its files have changed; of one that is as
most are (one session, ended) the events alone say everything. The trials of a search are
runs of its folder, and are called `SEARCH/TRIAL`. Way in: `RunList`.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from instep.dashboard.live import LiveRun
from instep.dashboard.pools import pool_beside
from instep.dashboard.searches import SearchFigures, is_search, searches_in
from instep.dashboard.sections import look_at, summary_of
from instep.errors import InstepError, RunError
from instep.events import STEPS
from instep.formats import FORMAT
from instep.growing_file import last_bytes, size_of
from instep.report.terminal.status import State, state_of
from instep.store.folder import is_running
from instep.store.ledger import last_step
from instep.store.run_files import Event, events_of, returns_in, step_ends, without_discarded
from instep.store.run_folder import WINDOW
from instep.store.run_members import RunMembers
from instep.words import not_utf8

_FORMAT = re.compile(rb"^format = (\d+)$", re.MULTILINE)

Row = dict[str, Any]

_MOST_OF_A_NAME = 255
"""Bytes of the name of a folder."""

_READ_AT_ONCE = 1 << 24
"""Bytes of the records of steps that are read whole to say how a run ended."""


class RunList:
    """Looks at a folder of runs, or at one run.

    Args:
        folder: that has run folders in it, or is one.
        pool: folder of the pool whose jobs these are; by default `pool` beside the folder.
    """

    def __init__(self, folder: Path, pool: Path | None = None) -> None:
        self.single = (folder / "job.toml").is_file() and _has_begun(folder)
        self.folder = folder.resolve().parent if self.single else folder.resolve()
        self._only = folder.resolve().name if self.single else ""
        self._looking = threading.Lock()
        self._rows: dict[str, tuple[Any, Row]] = {}
        self._live: dict[str, LiveRun] = {}
        self._searches: dict[str, SearchFigures] = {}
        self._trials: dict[str, RunList] = {}
        self.pool = pool or (None if self.single else pool_beside(self.folder))
        """The folder of the pool whose jobs these are, if it is known."""

    def paths(self) -> Iterator[Path]:
        """The folders of runs that may be shown: no links, as they may lead elsewhere."""
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as found:
            names = sorted(each.name for each in found if not each.is_symlink())
        for name in names:
            mine = not self._only or name == self._only
            if mine and not_utf8(name) is None and os.path.isfile(f"{self.folder}/{name}/job.toml"):
                yield self.folder / name

    def path_of(self, name: str) -> Path:
        """The folder of a run by its name.

        Raises:
            RunError: there is no such run here.
        """
        search, slash, trial = name.rpartition("/")
        if slash:
            return self.trials_of(search).path_of(trial)
        path = self.folder / name
        if not self._is_mine(name) or not _may_be_shown(path) or look_at(path) is None:
            raise RunError("there is no such run.")
        return path

    def _is_mine(self, name: str) -> bool:
        plain = name not in ("", ".", "..") and not {"/", "\0"} & {*name}
        if not plain or not_utf8(name) is not None or len(name.encode()) > _MOST_OF_A_NAME:
            return False
        return not self._only or name == self._only

    def search_of(self, name: str) -> SearchFigures:
        """A search by the name of its folder, which is here, or is this one.

        Raises:
            RunError: there is no such search here.
        """
        here = name == self.folder.name and is_search(self.folder)
        path = self.folder if here else self.folder / name
        if self.single or not self._is_mine(name) or not is_search(path):
            raise RunError("there is no such search.")
        return self._searches.setdefault(name, SearchFigures(path))

    def trials_of(self, search: str) -> RunList:
        """The runs of a search's trials.

        Raises:
            RunError: there is no such search here.
        """
        folder = self.search_of(search).folder
        return self._trials.setdefault(search, RunList(folder))

    def searches(self) -> list[dict[str, Any]]:
        """A row for each search here; the folder itself may be one."""
        names = [] if self.single else searches_in(self.folder)
        if not self.single and is_search(self.folder):
            names.append(self.folder.name)
        return [self._brief(name) for name in names]

    def _brief(self, search: str) -> dict[str, Any]:
        try:
            return self.search_of(search).brief()
        except Exception as error:  # a folder may hold anything, and others are listed
            return {"name": search, "error": why_unread(error)}

    def rows(self) -> dict[str, Row]:
        """A row for each run by name; one that cannot be read has `error`. Rows that have not
        changed are the same objects."""
        with self._looking:
            self._rows = {path.name: self._row_of(path) for path in self.paths()}
            self._live = {name: live for name, live in self._live.items() if name in self._rows}
            return {name: row for name, (_, row) in self._rows.items()}

    def row_of(self, name: str) -> Row | None:
        """The row of one run; None if there is none."""
        path = self.folder / name
        if not self._is_mine(name) or not _may_be_shown(path):
            return None
        self._rows[name] = self._row_of(path)
        return self._rows[name][1]

    def _row_of(self, path: Path) -> tuple[Any, Row]:
        """Tell what its files looked like, and give its row."""
        name = path.name
        try:
            found = look_at(path)
            if found is None:
                raise RunError("a file of it is a link, which may lead elsewhere, or no file.")
            running = is_running(path)
            key = found, running
            known = self._rows.get(name)
            if known and known[0] == key:
                return known
            if running:
                return key, self._live_row(path)
            row = _ended_row(path, has_summary=any(each[0] == "summary.json" for each in found))
            self._live.pop(name, None)
        except Exception as error:  # a folder may hold anything, and others are listed
            return None, {"name": name, "error": why_unread(error)}
        return key, row

    def _live_row(self, path: Path) -> Row:
        run = self._live.get(path.name)
        if run is None:
            run = self._live[path.name] = LiveRun(path)
        run.look()
        status, state = run.status("running"), _state_so_far(run, "running")
        events = run.named("validated")
        more = {"samples_per_s": status["samples_per_s"], "eta_s": status["eta_s"]}
        return _row(state, events, run.last("model_saved"), more)


def _has_begun(path: Path) -> bool:
    """Whether it is a run's folder, and not one that somebody has put a job into."""
    return any((path / name).exists() for name in ("run.id", "events.jsonl"))


def _may_be_shown(path: Path) -> bool:
    return not path.is_symlink() and (path / "job.toml").is_file()


def why_unread(error: Exception) -> str:
    """Say why a run cannot be shown."""
    if isinstance(error, InstepError | OSError):
        return str(error)
    return f"its files say what cannot be: {type(error).__name__}: {error}"


def _state_so_far(run: LiveRun, state: str) -> State:
    return State(
        run.path.name,
        state,
        run.times.first,
        run.times.seconds,
        run.members.team,
        run.last_step,
        run.plan.steps,
        run.last("validated").get("metrics") or {},
    )


def _state_of(path: Path) -> State:
    """Say what `state_of` says; a long run is not read whole."""
    if size_of(path / "steps.bin") <= _READ_AT_ONCE:
        return state_of(path)
    run = LiveRun(path, figures=False)
    run.look()
    return _state_so_far(run, str(run.ending.get("outcome") or "unfinished"))


def _ended_row(path: Path, *, has_summary: bool) -> Row:
    events = events_of(path / "events.jsonl")
    state = _brief(path, events) or _state_of(path)
    rate = summary_of(path).get("samples_per_second") if has_summary else None
    more = {"samples_per_s": rate, "eta_s": None}
    events = without_discarded(events)
    saved = [e for e in events if e["event"] == "model_saved"]
    validated = [e for e in events if e["event"] == "validated"]
    return _row(state, validated, saved[-1] if saved else {}, more)


def _row(state: State, validations: list[Event], saved: Event, more: Row) -> Row:
    table = {key: value for key, value in state.as_table().items() if key != "best"}
    return {
        **table,
        **more,
        "parameters_sha256": saved.get("parameters_sha256"),
        "best": _best(validations),
    }


def _best(validations: list[Event]) -> dict[str, dict[str, Any]]:
    """By metric, `least` and `most`: the value and its step."""
    found: dict[str, dict[str, Any]] = {}
    for event in validations:
        for name, value in (event.get("metrics") or {}).items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            best = found.setdefault(name, {"least": [value, event["step"]]})
            best.setdefault("most", best["least"])
            if value < best["least"][0]:
                best["least"] = [value, event["step"]]
            if value > best["most"][0]:
                best["most"] = [value, event["step"]]
    return found


def _brief(path: Path, events: list[Event]) -> State | None:
    """Say what `state_of` says of a run of one session that has ended; None for others."""
    told = _FORMAT.search((path / "job.toml").read_bytes())
    sessions = [e for e in events if e["event"] in ("run_started", "run_finished")]
    names = [each["event"] for each in sessions]
    members = RunMembers(events, np.zeros(0, STEPS), np.zeros(0, STEPS), 0)
    plain = names == ["run_started", "run_finished"] and members.generations
    if not plain or not told or int(told[1]) != FORMAT or returns_in(events):
        return None
    began, ended = sessions
    step = int(ended.get("step") or 0)
    if last_step(path / "ledger.bin") > step:
        return None
    latest = max(float(event["time"]) for event in events)
    data = last_bytes(path / "steps.bin", WINDOW * STEPS.itemsize)
    data = data[: len(data) // STEPS.itemsize * STEPS.itemsize]
    ends = step_ends(np.frombuffer(data, STEPS))
    latest = max(latest, float(ends.max(initial=0.0)))
    ready = [e for e in events if e["event"] == "worker_ready"]
    validated = [e for e in events if e["event"] == "validated"]
    return State(
        path.name,
        str(ended["outcome"]),
        float(began["time"]),
        latest - float(began["time"]),
        members.team,
        step,
        ready[-1].get("last_step") if ready else None,
        (validated[-1].get("metrics") or {}) if validated else {},
    )
