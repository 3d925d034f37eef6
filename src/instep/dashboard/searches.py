"""Searches for the page: which a folder has, and the trials of one, read from its record.

What is over is in the record; how far an open trial is, its run says. Nothing is started or decided
here. Ways in: `searches_in`, `SearchFigures`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep import detached
from instep.errors import InstepError
from instep.search.begin import SearchState, found_in
from instep.search.record import FILE, LOCK, SearchRecord
from instep.search.results import Result, Values, best_of, name_of
from instep.words import command, not_utf8, short_number

Chosen = list[tuple[Values, tuple[tuple[int, float], ...]]]
RowOf = Callable[[str], Mapping[str, Any] | None]
"""Gives what is known of the run of a trial by its name; None if it has none."""

_MOST = 2000
"""Trials that are shown; of more, the newest."""


def is_search(path: Path) -> bool:
    """Whether a folder is that of a search; links are none."""
    try:
        is_file = stat.S_ISREG(os.lstat(f"{path}/{FILE}").st_mode)
    except OSError:
        return False
    return is_file and not path.is_symlink()


def searches_in(folder: Path) -> list[str]:
    """Names of the searches in a folder of runs."""
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if not_utf8(p.name) is None and is_search(p))


def record_key(folder: Path) -> list[tuple[str, int, int]]:
    """Another one whenever the record of a search has changed."""
    found = []
    for name in (FILE, f"{FILE}-wal"):
        with suppress(FileNotFoundError):
            about = (folder / name).stat()
            found.append((name, about.st_size, about.st_mtime_ns))
    return found


def is_conducted(folder: Path) -> bool:
    """Whether a process is at a search."""
    try:
        return detached.lives(folder / LOCK)
    except OSError:  # the file is somebody else's
        return False


class SearchFigures:
    """One search, read again when its record has changed.

    Args:
        folder: of the search.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key: Any = None
        self._found: SearchState | None = None
        self._chosen: Chosen = []

    def _read(self) -> SearchState:
        key = record_key(self.folder)
        if self._found is None or key != self._key:
            self._found, self._key = found_in(self.folder), key
            with SearchRecord(self.folder, write=False) as record:
                self._chosen = record.chosen()
        return self._found

    def brief(self) -> dict[str, Any]:
        """A row of a list of searches; one that cannot be read has `error`."""
        try:
            found = self._read()
        except InstepError as error:
            return {"name": self.folder.name, "error": str(error)}
        best = found.best
        return {
            "name": self.folder.name,
            "running": is_conducted(self.folder),
            "metric": found.job.stop.metric,
            "told": len(found.told),
            "of": found.trials,
            "best": None if best is None else found.told[best].result.value,
        }

    def sections(self, prefix: str, row_of: RowOf) -> dict[str, Any]:
        """The page of the search.

        Args:
            prefix: of the names of its trials' runs, in links.
            row_of: tells how far the run of an open trial is.

        Raises:
            InstepError: it cannot be read.
        """
        found = self._read()
        spec, upwards = found.job.search, found.job.stop.upwards
        running = is_conducted(self.folder)
        keys = {
            key: {"log": each.log, "choices": list(each.choices)}
            for key, each in spec.ranges.items()
        }
        table = {key: value for key, value in found.as_table().items() if key != "trials"}
        shown = range(max(0, len(self._chosen) - _MOST), len(self._chosen))
        trials = [self._trial(found, number, prefix, row_of) for number in shown]
        return {
            "search": {
                **table,
                "name": self.folder.name,
                "upwards": upwards,
                "running": running,
                "told": len(found.told),
                "keys": keys,
                "sampler": spec.sampler,
                "prune": spec.prune,
                "rungs": list(spec.rungs),
                "best_trial": None if found.best is None else name_of(found.best),
            },
            "verdict": _verdict(found, running),
            "trials": trials,
            "top": [f"{prefix}{name_of(number)}" for number in best_of(found.told, upwards, 10)],
            "next": self._next(found, running),
        }

    def _trial(self, found: SearchState, number: int, prefix: str, row_of: RowOf) -> dict[str, Any]:
        values, bounds = self._chosen[number]
        name = name_of(number)
        about = {"trial": name, "run": f"{prefix}{name}", "values": dict(values)}
        if number in found.told:
            result = found.told[number].result
            return {**about, **result._asdict(), "pruned": _pruned(result, dict(bounds))}
        row = row_of(name) or {}
        return {
            **about,
            "state": "running" if row.get("state") == "running" else "waiting",
            "value": None,
            "steps": row.get("step") or 0,
            "of": row.get("steps"),
            "seconds": row.get("seconds"),
            "why": str(row.get("error") or ""),
            "pruned": "",
        }

    def _next(self, found: SearchState, running: bool) -> list[str]:
        lines = [command("list", self.folder, f"--best {found.job.stop.metric}")]
        if found.best is not None:
            lines.insert(0, command("report", self.folder / name_of(found.best)))
        if len(found.told) < found.trials and not running:
            lines.insert(0, command("search", self.folder))
        return lines


def _pruned(result: Result, bounds: Mapping[int, float]) -> str:
    """Where a trial was ended early, and by which bound; empty if it was not."""
    if result.state != "pruned":
        return ""
    if not result.rungs:
        return "pruned"
    rung, value = result.rungs[-1]
    bound = f", the bound was {short_number(bounds[rung])}" if rung in bounds else ""
    return f"at validation {rung} with {short_number(value)}{bound}"


def _verdict(found: SearchState, running: bool) -> dict[str, str]:
    counts = [
        f"{count} {state}"
        for state in ("completed", "pruned", "failed")
        if (count := sum(told.result.state == state for told in found.told.values()))
    ]
    over = len(found.told) >= found.trials
    text = f"{len(found.told)} of {found.trials} trials have their result"
    text += f": {', '.join(counts)}." if counts else "."
    if found.best is not None:
        value = found.told[found.best].result.value
        reached = "-" if value is None else short_number(value)
        text += f" The best is {name_of(found.best)}, with {found.job.stop.metric} {reached}."
    if not over and not running:
        text += " No process continues it."
    return {"mark": "good" if over else "live" if running else "calm", "text": text}
