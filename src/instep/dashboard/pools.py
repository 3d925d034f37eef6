"""A pool for the page: its shares, its hosts, its jobs, and why each waits, read from its journal.

Nothing here asks the scheduler. Ways in: `pool_beside`, `pool_sections`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.errors import InstepError
from instep.pool.ahead.forecast import JobForecast, forecast
from instep.pool.hosts.placement import with_hosts
from instep.pool.jobs import ENDED, PoolState
from instep.pool.pool_file import SPEC, PoolFolder
from instep.pool.pool_journal import FILE as JOURNAL
from instep.pool.requests import FOLDER as INBOX
from instep.pool.view import LISTED, as_tables, explanation, host_tables
from instep.words import command

POOL = "pool"
"""The folder of a pool, where no other is named."""

_MOST = 500
"""Jobs that are shown: all that have not ended, and the last of the others."""


def is_pool(path: Path) -> bool:
    """Whether a folder is that of a pool; links are none."""
    spec = path / SPEC
    return not path.is_symlink() and spec.is_file() and not spec.is_symlink()


def runs_of(pool: Path) -> Path:
    """The folder of the runs of a pool.

    Raises:
        RunError: it cannot be read.
    """
    return PoolFolder(pool).runs


def pool_beside(runs: Path) -> Path | None:
    """The folder of the pool whose runs are in a folder, where it is called `pool` and lies beside
    it."""
    path = runs.parent / POOL
    with suppress(InstepError, OSError):
        if is_pool(path) and PoolFolder(path).runs.resolve() == runs.resolve():
            return path
    return None


def pool_key(folder: Path) -> Any:
    """Another one whenever what is written of a pool has changed."""
    found: list[Any] = [PoolFolder(folder).scheduled]
    for name in (SPEC, JOURNAL, f"{JOURNAL}-wal", INBOX):
        with suppress(FileNotFoundError):
            about = (folder / name).stat()
            found.append((name, about.st_size, about.st_mtime_ns))
    return found


def pool_brief(folder: Path) -> dict[str, Any]:
    """A pool in a line of the list; one that cannot be read has `error`."""
    try:
        pool = PoolFolder(folder)
        state, scheduled = pool.state(), pool.scheduled
    except (InstepError, OSError) as error:
        return {"error": str(error)}
    states = [job.status for job in state.jobs.values()]
    return {
        "held": state.held,
        "cores": state.cores,
        "scheduled": scheduled,
        "jobs": {each: states.count(each) for each in sorted({*states})},
    }


def pool_sections(folder: Path) -> dict[str, Any]:
    """The page of a pool.

    Raises:
        InstepError: it cannot be read.
    """
    pool = PoolFolder(folder)
    state, scheduled = pool.state(), pool.scheduled
    now = time.time()
    state = with_hosts(state, now)
    ahead = forecast(state, now, most=LISTED)
    tables = {table["id"]: table for table in as_tables(state, now, ahead)}
    ended = sorted(
        (job.id for job in state.jobs.values() if job.status == ENDED),
        key=lambda name: state.jobs[name].ended or 0.0,
        reverse=True,
    )
    still = [job.id for job in state.jobs.values() if job.status != ENDED]
    shown = [*still, *ended][:_MOST]
    busy = f"{state.held} of {state.cores} cores are busy"
    idle = "" if scheduled else " No scheduler is there: jobs that run go on, and no other starts."
    return {
        "pool": {
            "folder": str(folder),
            "cores": state.cores,
            "held": state.held,
            "scheduled": scheduled,
            "jobs": len(state.jobs),
        },
        "verdict": {"mark": "live" if scheduled else "calm", "text": f"{busy}.{idle}"},
        "shares": _shares(state),
        "hosts": _hosts(state),
        "jobs": [{**tables[each], "told": _told(state, each, now, ahead)} for each in shown],
        "next": _next(folder, scheduled),
    }


def _told(
    state: PoolState, name: str, now: float, ahead: Mapping[str, JobForecast]
) -> list[list[str]]:
    """Give what `instep explain` says of a job, as pairs of words."""
    lines = explanation(state, state.jobs[name], now, ahead)[1:]
    return [[line[:8].strip(), line[8:].strip()] for line in lines]


def _hosts(state: PoolState) -> list[dict[str, Any]]:
    """Tell what each host has, and its state in a word or two."""
    found = []
    for table in host_tables(state):
        busy = sum(table["workers"].values())
        words = ["draining" if busy else "drained"] if table["drained"] else []
        words += ["out of reach"] if table["out_of_reach_since"] is not None else []
        found.append({**table, "busy": busy, "state": ", ".join(words) or "in reach"})
    return found


def _shares(state: PoolState) -> list[dict[str, Any]]:
    """Tell what each share has, and what is due to it: of those whose jobs have not all ended."""
    names = sorted({job.share for job in state.jobs.values() if job.status != ENDED})
    total = sum(map(state.weight, names))
    return [
        {
            "share": name,
            "held": sum(job.held for job in state.jobs.values() if job.share == name),
            "due": state.weight(name) / total,
            "weight": state.weight(name),
            "limit": state.limits.get(name),
            "used_s": round(state.used.get(name, 0.0), 1),
        }
        for name in names
    ]


def _next(folder: Path, scheduled: bool) -> list[str]:
    start = [] if scheduled else [command("pool --pool", folder, "start")]
    return [*start, command("list --pool", folder)]
