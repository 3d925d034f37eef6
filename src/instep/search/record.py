"""The record of a search on disk, so that the same command continues when it was killed.

One SQLite file in the folder of the search, with one writer, which has the folder locked. A trial
is a row when its values are chosen, before its run begins, and gets its result when its run is
over. Nothing is ever changed after that. Way in: `SearchRecord`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from instep.errors import RunError
from instep.search.results import Result, ToldTrial, Values
from instep.store.own_files import lock, open_own, unlock
from instep.store.own_rows import open_rows

FILE = "search.sqlite"
LOCK = "search.id"
VERSION = 1

_TABLES = (
    "CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS trials "
    "(number INTEGER PRIMARY KEY, chosen TEXT NOT NULL, bounds TEXT NOT NULL, result TEXT)",
)


class SearchRecord:
    """The record of one search.

    Args:
        folder: of the search.
        write: whether to make it where there is none, and to write; only with the folder locked.

    Raises:
        RunError: there is none, or it cannot be used.
    """

    def __init__(self, folder: Path, *, write: bool) -> None:
        self._path = folder / FILE
        if not write and not self._path.is_file():
            raise RunError(f"{folder} is not the folder of a search: it has no {FILE}.")
        with self._usable():
            self._rows = open_rows(self._path, _TABLES, version=VERSION, write=write)

    def __enter__(self) -> SearchRecord:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with suppress(sqlite3.Error):
            self._rows.close()

    def about(self) -> dict[str, str]:
        """Facts about the search: its job."""
        with self._usable():
            return dict(self._rows.execute("SELECT key, value FROM about"))

    def keep_about(self, values: Mapping[str, str]) -> None:
        """Write facts about the search."""
        with self._usable():
            self._rows.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", [*values.items()])

    def chosen(self) -> list[tuple[Values, tuple[tuple[int, float], ...]]]:
        """The values of each trial, and its bounds at rungs, in order."""
        with self._usable():
            found = self._rows.execute("SELECT chosen, bounds FROM trials ORDER BY number")
            return [
                (json.loads(values), tuple((rung, bound) for rung, bound in json.loads(bounds)))
                for values, bounds in found
            ]

    def results(self) -> dict[int, ToldTrial]:
        """The trials that are over."""
        with self._usable():
            found = self._rows.execute(
                "SELECT number, chosen, result FROM trials WHERE result IS NOT NULL ORDER BY number"
            )
            return {
                number: ToldTrial(json.loads(values), _result(json.loads(result)))
                for number, values, result in found
            }

    def choose(self, number: int, values: Values, bounds: tuple[tuple[int, float], ...]) -> None:
        """Write the values of a trial, before its run begins."""
        with self._usable():
            row = number, json.dumps(dict(values)), json.dumps(bounds)
            self._rows.execute("INSERT INTO trials (number, chosen, bounds) VALUES (?, ?, ?)", row)

    def tell(self, number: int, result: Result) -> None:
        """Write the result of a trial."""
        with self._usable():
            text = json.dumps(result._asdict())
            self._rows.execute(
                "UPDATE trials SET result = ? WHERE number = ? AND result IS NULL", (text, number)
            )

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, ValueError, TypeError, LookupError) as error:
            raise RunError(
                f"{self._path} cannot be used: {error}. Make room, or get access to it; if it is "
                "damaged, begin another search with --name."
            ) from None


def _result(table: dict[str, Any]) -> Result:
    table["rungs"] = tuple((rung, value) for rung, value in table["rungs"])
    return Result(**table)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a search, for as long as the context lasts or the process lives.

    Raises:
        RunError: another process has it.
    """
    with open_own(folder / LOCK) as file:
        if not lock(file):
            raise RunError(
                f"the search in {folder} is running in another process. Wait for its end, or stop "
                "it there with Ctrl-C."
            )
        try:
            yield
        finally:
            unlock(file)
