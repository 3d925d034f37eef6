"""The record of a search on disk, so that the same command continues when it was killed.

One SQLite file in the folder of the search, with one writer, which has the folder locked. A trial
is a row when its values are chosen, before its run begins, and gets its result when its run is
over. Nothing is ever changed after that. Each text ends with its checksum, and one row says how
many trials are chosen, so a changed digit or a lost row is noticed. Way in: `SearchRecord`.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from instep.errors import RunError
from instep.search.results import Result, ToldTrial, Values
from instep.store.own_files import lock, open_own, unlock
from instep.store.own_rows import at_once, open_rows, summed, unsummed, usable

FILE = "search.sqlite"
LOCK = "search.id"
VERSION = 1

_TABLES = (
    "CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS trials "
    "(number INTEGER PRIMARY KEY, chosen TEXT NOT NULL, bounds TEXT NOT NULL, result TEXT)",
)


_COUNT = "chosen"
"""The fact that says how many trials are chosen; earlier versions wrote none."""


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
            rows = self._rows.execute("SELECT key, value FROM about").fetchall()
        return {key: self._text(f"fact {key}", value) for key, value in rows}

    def keep_about(self, values: Mapping[str, str]) -> None:
        """Write facts about the search."""
        rows = [(key, summed(f"fact {key}", value)) for key, value in values.items()]
        with self._usable():
            self._rows.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def chosen(self) -> list[tuple[Values, tuple[tuple[int, float], ...]]]:
        """The values of each trial, and its bounds at rungs, in order."""
        with self._usable(), at_once(self._rows):
            query = "SELECT number, chosen, bounds FROM trials ORDER BY number"
            rows, known = self._rows.execute(query).fetchall(), self.about().get(_COUNT)
        if [number for number, *_ in rows] != [*range(len(rows))]:
            raise self._damaged(f"it has {len(rows)} trials, and not the first ones")
        if known is not None and known != str(len(rows)):
            raise self._damaged(f"it has {len(rows)} trials, and had {known}")
        return [
            (
                self._table(f"the values of trial {number}", values),
                tuple(
                    (rung, bound)
                    for rung, bound in self._value(f"the bounds of trial {number}", bounds)
                ),
            )
            for number, values, bounds in rows
        ]

    def results(self) -> dict[int, ToldTrial]:
        """The trials that are over."""
        with self._usable():
            rows = self._rows.execute(
                "SELECT number, chosen, result FROM trials WHERE result IS NOT NULL ORDER BY number"
            ).fetchall()
        found = {}
        for number, values, result in rows:
            name = f"the result of trial {number}"
            table = self._value(name, result)
            with self._readable(name):
                told = _result(table)
            found[number] = ToldTrial(self._table(f"the values of trial {number}", values), told)
        return found

    def choose(self, number: int, values: Values, bounds: tuple[tuple[int, float], ...]) -> None:
        """Write the values of a trial, before its run begins."""
        row = (
            number,
            summed(f"the values of trial {number}", json.dumps(dict(values))),
            summed(f"the bounds of trial {number}", json.dumps(bounds)),
        )
        count = _COUNT, summed(f"fact {_COUNT}", str(number + 1))
        with self._usable(), at_once(self._rows):
            text = "INSERT INTO trials (number, chosen, bounds) VALUES (?, ?, ?)"
            self._rows.execute(text, row)
            self._rows.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", count)

    def tell(self, number: int, result: Result) -> None:
        """Write the result of a trial."""
        text = summed(f"the result of trial {number}", json.dumps(result._asdict()))
        with self._usable():
            self._rows.execute(
                "UPDATE trials SET result = ? WHERE number = ? AND result IS NULL", (text, number)
            )

    def _text(self, name: str, text: object) -> str:
        with self._readable(name):
            return unsummed(name, text)

    def _value(self, name: str, text: object) -> Any:
        with self._readable(name):
            return json.loads(unsummed(name, text))

    def _table(self, name: str, text: object) -> dict[str, Any]:
        with self._readable(name):
            return msgspec.convert(json.loads(unsummed(name, text)), dict[str, Any])

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError) as error:  # of JSON too
            raise self._damaged(f"{name}: {error}") from None

    def _usable(self) -> AbstractContextManager[None]:
        return usable(
            self._path,
            "Make room, or get access to it; if it is damaged, begin another search with --name.",
        )

    def _damaged(self, why: str) -> RunError:
        return RunError(
            f"{self._path} is damaged: {why}. Put a copy of it back, or begin another search with "
            "--name."
        )


class _ResultTable(msgspec.Struct, forbid_unknown_fields=True):
    """A result as its row has it; the fields are those of `Result`, in its order."""

    state: str
    value: float | None
    rungs: tuple[tuple[int, float], ...] = ()
    steps: int = 0
    seconds: float | None = 0.0
    parameters_sha256: str = ""
    why: str = ""


def _result(table: Any) -> Result:
    told = msgspec.convert(table, _ResultTable)
    if told.value is not None and not math.isfinite(told.value):
        raise ValueError("its value is not finite")
    return Result(*msgspec.structs.astuple(told))


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
