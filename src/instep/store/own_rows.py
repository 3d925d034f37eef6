"""Opens SQLite files of ours that have one writer and outlive it: what is written is on the disk.

What lies in them their owners know: the record of a search, the journal of a pool. Who reads makes
and changes nothing beside them, as SQLite itself would (the index of a write-ahead log). A text in
a row can end with its checksum (`summed`, `unsummed`), so a changed digit is noticed.
"""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from instep.errors import RunError
from instep.plain_file import beside_of, check_plain, plain

_END = re.compile(r" [0-9a-f]{8}")


def open_rows(
    path: Path, tables: Iterable[str], *, version: int, write: bool
) -> sqlite3.Connection:
    """Open a file of rows.

    Args:
        path: of the file.
        tables: statements that make them where there are none.
        version: of what lies in the file.
        write: whether to make it where there is none, and to write.

    Returns:
        A connection in which each statement is a transaction, unless one is begun.

    Raises:
        RunError: another version of instep wrote the file, or it is empty.
        OSError, sqlite3.Error: it cannot be used.
    """
    check_plain(path)
    if write and not path.exists():
        _make(path, tables, version)
    if path.stat().st_size == 0:  # it never was when it was made
        raise RunError(
            f"{path} is empty, so what it had is lost. Put a copy of it back, or delete it to "
            "begin anew."
        )
    rows = _connected(path, "mode=rwc") if write else _readable(path)
    (found,) = rows.execute("PRAGMA user_version").fetchone()
    if found != version:
        rows.close()
        raise RunError(f"{path} was written by another version of instep.")
    if write:
        rows.execute("PRAGMA journal_mode = WAL")
        rows.execute("PRAGMA synchronous = FULL")
    return rows


def _make(path: Path, tables: Iterable[str], version: int) -> None:
    """Make the file at once: nobody ever sees one without its tables."""
    beside = beside_of(path)
    try:
        beside.unlink(missing_ok=True)
        with closing(sqlite3.connect(beside, isolation_level=None)) as rows:
            rows.execute("BEGIN")
            for table in tables:
                rows.execute(table)
            rows.execute(f"PRAGMA user_version = {version}")
            rows.execute("COMMIT")
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        beside.unlink(missing_ok=True)


def _connected(path: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)


def _readable(path: Path) -> sqlite3.Connection:
    """Open for reading, making and changing no file."""
    log, index = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    try:
        logged = log.lstat().st_size
    except FileNotFoundError:
        logged = 0
    if not logged:  # its writer has closed it: all of it is in the file
        return _connected(path, "immutable=1")
    if index.exists():  # its writer has it open, or was killed
        return _connected(path, "mode=ro&readonly_shm=1")
    return _copied(path, log)


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """Read a file and its log into memory: a copy of a folder may lack the index."""
    found = sqlite3.connect(":memory:", isolation_level=None)
    with tempfile.TemporaryDirectory() as folder:
        for file in (path, log):
            with open(plain(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
                Path(folder, file.name).write_bytes(source.read())
        copy = _connected(Path(folder, path.name), "mode=rw")
        try:
            copy.backup(found)
        finally:
            copy.close()
    return found


@contextmanager
def at_once(rows: sqlite3.Connection, how: str = "") -> Iterator[None]:
    """In this context execute all statements or none; what is read is of one moment.

    Args:
        rows: of `open_rows`.
        how: word that follows BEGIN, such as IMMEDIATE.
    """
    rows.execute(f"BEGIN {how}")
    try:
        yield
        rows.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            rows.execute("ROLLBACK")
        raise


@contextmanager
def usable(path: Path, remedy: str) -> Iterator[None]:
    """In this context a file of rows is used.

    Args:
        path: of the file.
        remedy: sentence that follows the error.

    Raises:
        RunError: it cannot be used.
    """
    try:
        yield
    except (OSError, sqlite3.Error, UnicodeError) as error:  # its own words may be damaged
        raise RunError(f"{path} cannot be used: {error}. {remedy}") from None


def summed(name: str, text: str) -> str:
    """A text of a row, with the checksum of its name and itself at its end."""
    return f"{text} {_sum(name, text):08x}"


def unsummed(name: str, text: object) -> str:
    """A text of a row, without its checksum; those of earlier versions have none.

    Args:
        name: of the text, as it was given to `summed`.
        text: as it was found in the row.

    Raises:
        ValueError: it is no text, or not what was written; it says which.
    """
    if not isinstance(text, str):  # one byte of the file says which type it is
        raise ValueError("it is no text")
    if not _END.fullmatch(text[-9:]):
        return text
    value, end = text[:-9], text[-8:]
    if int(end, 16) != _sum(name, value):
        raise ValueError("it does not match its checksum")
    return value


def _sum(name: str, text: str) -> int:
    return zlib.crc32(f"{name} {text}".encode())
