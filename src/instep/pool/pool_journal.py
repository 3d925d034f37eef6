"""The journal of a pool: each event and the jobs that it changed, in one transaction.

It is written before anything is done. Another scheduler begins with the state that it finds. Only
the scheduler writes; others read. Each row ends with its checksum, and the last one says how many
jobs there are, so a changed digit or a lost row is noticed. Way in: `PoolJournal`.
"""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from instep.errors import RunError
from instep.pool.jobs import PoolEvent, PoolHost, PoolJob, PoolState
from instep.store.own_rows import at_once, open_rows, summed, unsummed, usable

FILE = "pool.sqlite"
VERSION = 1

_TABLES = (
    "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, time REAL, event TEXT)",
    "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, job TEXT)",
    "CREATE TABLE IF NOT EXISTS about (one PRIMARY KEY, about TEXT)",
)

_Row = TypeVar("_Row")


class _About(msgspec.Struct):
    """Facts beside the jobs."""

    used: dict[str, float] = {}
    at: float = 0.0
    jobs: int | None = None
    """How many there are; None in a row of an earlier version."""
    hosts: dict[str, PoolHost] = {}


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
        with self._usable():
            self._rows = open_rows(self._path, _TABLES, version=VERSION, write=write)

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._rows.close()

    def load(self, state: PoolState) -> PoolState:
        """The state with what is written.

        Raises:
            RunError: it cannot be read, or is damaged.
        """
        with self._usable():
            rows = self._rows.execute("SELECT id, job FROM jobs ORDER BY rowid").fetchall()
            about = self._rows.execute("SELECT about FROM about").fetchone()
        jobs = {id: self._checked(f"job {id}", text, PoolJob) for id, text in rows}
        known = self._checked("all jobs", about[0], _About) if about else _About()
        if known.jobs not in (None, len(jobs)):
            raise self._damaged(f"it has {len(jobs)} jobs, and had {known.jobs}")
        hosts = dict(state.hosts)
        for name in hosts.keys() & known.hosts.keys():
            now = hosts[name]  # how large it is, the pool's file says
            was = known.hosts[name]
            hosts[name] = msgspec.structs.replace(
                now, drained=was.drained, leaving=was.leaving, away=was.away, workers=was.workers
            )
        return msgspec.structs.replace(state, jobs=jobs, hosts=hosts, used=known.used, at=known.at)

    def check(self) -> None:
        """Check all events too, which nobody reads again.

        Raises:
            RunError: one cannot be read, or is damaged.
        """
        with self._usable():
            for number, text in self._rows.execute("SELECT number, event FROM events"):
                self._checked(f"event {number}", text, msgspec.Raw)

    def write(self, event: PoolEvent, before: PoolState, after: PoolState) -> None:
        """Write an event, and what it has changed: all of it, or nothing.

        Raises:
            RunError: it cannot be written.
        """
        changed = [
            (job.id, _summed(f"job {job.id}", job))
            for job in after.jobs.values()
            if before.jobs.get(job.id) is not job
        ]
        facts = _About(dict(after.used), after.at, len(after.jobs), dict(after.hosts))
        about = _summed("all jobs", facts)
        with self._usable(), at_once(self._rows, "IMMEDIATE"):
            (last,) = self._rows.execute("SELECT max(number) FROM events").fetchone()
            number = (last or 0) + 1
            self._rows.execute(
                "INSERT INTO events VALUES (?, ?, ?)",
                (number, after.at, _summed(f"event {number}", event)),
            )
            self._rows.executemany(
                "INSERT INTO jobs VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET job = excluded.job",
                changed,
            )
            self._rows.execute("INSERT OR REPLACE INTO about VALUES (1, ?)", (about,))

    def _checked(self, name: str, text: object, kind: type[_Row]) -> _Row:
        """The value of a row; rows of earlier versions have no checksum."""
        try:
            return msgspec.json.decode(unsummed(name, text), type=kind)
        except ValueError as error:  # msgspec's too
            raise self._damaged(f"{name}: {error}") from None

    def _usable(self) -> AbstractContextManager[None]:
        return usable(self._path, "Make room, or get access to it.")

    def _damaged(self, why: str) -> RunError:
        return RunError(
            f"{self._path} is damaged: {why}. Put a copy of it back, or move it away: then `instep "
            "pool start` begins without jobs, and runs that go on do so."
        )


def _summed(name: str, value: object) -> str:
    """A row's text: the value, and the checksum of its name and it."""
    return summed(name, msgspec.json.encode(value).decode())
