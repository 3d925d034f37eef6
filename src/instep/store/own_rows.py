"""Opens SQLite files of ours that have one writer and outlive it: what is written is on the disk.

What lies in them their owners know: the record of a search, the journal of a pool.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from instep.errors import RunError
from instep.plain_file import check_plain


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
        RunError: another version of instep wrote the file.
        OSError, sqlite3.Error: it cannot be used.
    """
    check_plain(path)
    name = f"{path.absolute().as_uri()}?mode={'rwc' if write else 'ro'}"
    rows = sqlite3.connect(name, uri=True, isolation_level=None)
    (found,) = rows.execute("PRAGMA user_version").fetchone()
    if found not in ({0, version} if write else {version}):
        rows.close()
        raise RunError(f"{path} was written by another version of instep.")
    if write:
        rows.execute("PRAGMA journal_mode = WAL")
        rows.execute("PRAGMA synchronous = FULL")
        for table in tables:
            rows.execute(table)
        rows.execute(f"PRAGMA user_version = {version}")
    return rows
