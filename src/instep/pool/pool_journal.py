"""The journal of a pool: each event and the jobs that it changed, in one transaction.

It is written before anything is done. Another scheduler begins with the state that it finds. Only
the scheduler writes; others read. Way in: `PoolJournal`.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

import msgspec

from instep.errors import RunError
from instep.pool.jobs import PoolEvent, PoolJob, PoolState
from instep.store.own_rows import open_rows

FILE = "pool.sqlite"
VERSION = 1

_TABLES = (
    "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, time REAL, event TEXT)",
    "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, job TEXT)",
    "CREATE TABLE IF NOT EXISTS about (one PRIMARY KEY, about TEXT)",
)


class _About(msgspec.Struct):
    """Facts beside the jobs."""

    used: dict[str, float] = {}
    at: float = 0.0


class PoolJournal:
    """The journal of one pool.

    Args:
        folder: of the pool.
        write: whether to make it and write; only the scheduler does.

    Raises:
        RunError: it cannot be used.
    """

    def __init__(self, folder: Path, *, write: bool) -> None:
        self._path = folder / FILE
        if not write and not self._path.is_file():
            raise RunError(f"there is no pool in {folder}. Start one: instep pool start")
        try:
            self._rows = open_rows(self._path, _TABLES, version=VERSION, write=write)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._rows.close()

    def load(self, state: PoolState) -> PoolState:
        """The state with what is written."""
        try:
            rows = self._rows.execute("SELECT job FROM jobs ORDER BY rowid").fetchall()
            about = self._rows.execute("SELECT about FROM about").fetchone()
            jobs = [msgspec.json.decode(text, type=PoolJob) for (text,) in rows]
            known = msgspec.json.decode(about[0], type=_About) if about else _About()
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise self._unusable(error) from None
        return msgspec.structs.replace(
            state, jobs={job.id: job for job in jobs}, used=known.used, at=known.at
        )

    def write(self, event: PoolEvent, before: PoolState, after: PoolState) -> None:
        """Write an event, and what it has changed."""
        changed = [
            (job.id, msgspec.json.encode(job).decode())
            for job in after.jobs.values()
            if before.jobs.get(job.id) is not job
        ]
        about = msgspec.json.encode(_About(dict(after.used), after.at)).decode()
        try:
            self._rows.execute("BEGIN IMMEDIATE")
            self._rows.execute(
                "INSERT INTO events (time, event) VALUES (?, ?)",
                (after.at, msgspec.json.encode(event).decode()),
            )
            self._rows.executemany(
                "INSERT INTO jobs VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET job = excluded.job",
                changed,
            )
            self._rows.execute("INSERT OR REPLACE INTO about VALUES (1, ?)", (about,))
            self._rows.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._rows.execute("ROLLBACK")
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> RunError:
        return RunError(f"{self._path} cannot be used: {error}. Make room, or get access to it.")
