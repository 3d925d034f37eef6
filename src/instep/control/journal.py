"""The master's decisions on disk, so that another master can continue when one is killed.

Each decision that changes the state is a row: the time, the event, and the state after it. It is
written before any action is taken. Of the members most rows have only those that this decision
changed, so that a decision costs about the same whatever their number; some have all. The next
master continues from the last row, and the rows before it, back to one that has all. Beside them:
keys that another master must know (`keys.py`). None of it is secret; only its owner may read it.

A master has the file locked for as long as it lives. If another process has locked it before, the
master continues with a copy of the same name: a lock is on the file that a process has open.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from instep.control.decisions.events import Event
from instep.control.decisions.phases import Member
from instep.control.decisions.state import State
from instep.errors import RunError
from instep.plain_file import PRIVATE, check_plain, read_plain
from instep.store.folder import StartPoint
from instep.store.own_files import gone
from instep.undecodable import UNDECODABLE

T = TypeVar("T")

FILE = "journal.sqlite"
"""In the run folder; of the latest session."""

WHOLE_EVERY = 64
"""One row of so many has all members."""

LOCKED_S = 1.0
"""How long another process may have it locked before the master continues with a copy."""

_TRIES = 3

VERSION = 1
"""Of its rows. Without checksums they had none."""


class _Changed(Exception):
    """A row is not as it was written."""


_DAMAGED = (sqlite3.Error, _Changed)
"""What reading it raises where the disk has changed it. SQLite's are also those of a full disk."""


class Begin(msgspec.Struct, frozen=True):
    """The beginning of a session."""

    started: float
    """Unix seconds at which the user's command began."""
    start_point: StartPoint


class _Row(msgspec.Struct, frozen=True):
    """A state, or what is new in it."""

    state: State
    """Its `members` are those that are new, or not as they were in the row before."""
    gone: list[int]
    """Numbers of members that the row before had, and this state has not."""


class Journal:
    """The journal of one session of a run.

    Args:
        run: the run folder.
        begin: of a new session, whose journal is empty; None to continue the one that is
            there.

    Raises:
        RunError: it cannot be read or written.
    """

    warnings: tuple[str, ...] = ()
    """For the user."""

    def __init__(self, run: Path, begin: Begin | None = None) -> None:
        self._path = run / FILE
        self._members: Mapping[int, Member] = {}  # as they were in the row before
        self._rows_written = 0
        first = msgspec.msgpack.encode(begin, enc_hook=_plain) if begin is not None else b""
        try:
            if begin is not None:
                self._path.unlink(missing_ok=True)
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
            check_plain(self._path)  # sqlite would wait at a named pipe for ever
            self._rows = self._locked()
        except OSError as error:
            raise self._unusable(error.strerror) from None
        except _DAMAGED as error:
            raise self._unusable(error) from None
        try:
            self.begin = self._begun(first)
        except BaseException:
            self._rows.close()
            raise

    def _begun(self, first: bytes) -> Begin:
        """The beginning of the session; writes it if it is given."""
        try:
            self._rows.execute("PRAGMA journal_mode = TRUNCATE")  # also where memory is not shared
            self._rows.execute("PRAGMA synchronous = OFF")  # outlives a process, not a host
            self._rows.execute("CREATE TABLE IF NOT EXISTS begin (begin BLOB)")
            self._rows.execute(
                "CREATE TABLE IF NOT EXISTS decisions "
                "(number INTEGER PRIMARY KEY, time REAL, event TEXT, whole INTEGER, state BLOB)"
            )
            self._rows.execute("CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, value BLOB)")
            if first:
                self._rows.execute(f"PRAGMA user_version = {VERSION}")
                self._rows.execute("INSERT INTO begin VALUES (?)", (_sealed(first),))
            else:
                _check(self._rows)
            found = self._rows.execute("SELECT begin FROM begin").fetchone()
            (version,) = self._rows.execute("PRAGMA user_version").fetchone()
            if found and version != VERSION:
                raise RunError(self._of_another_version())
            begin = self._decoded(_opened(*found), Begin) if found else None
        except _DAMAGED as error:
            raise self._unusable(error) from None
        if begin is None:
            raise RunError(
                f"{self._path} cannot be used: it is empty, or was removed during the run, "
                "and the decisions of its master are lost."
            )
        return begin

    def _locked(self) -> sqlite3.Connection:
        """A connection that no other process can disturb."""
        for left in reversed(range(_TRIES)):
            rows = sqlite3.connect(self._path, isolation_level=None, timeout=LOCKED_S)
            try:
                rows.execute("PRAGMA locking_mode = EXCLUSIVE")
                rows.execute("BEGIN EXCLUSIVE")
                rows.execute("COMMIT")
                return rows
            except sqlite3.Error as error:
                rows.close()
                if not left or getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_BUSY:
                    raise
            self._put_copy()
        raise AssertionError("the last try raises")

    def _put_copy(self) -> None:
        """Put a copy in the place of the file, without what another process has not committed.

        Raises:
            sqlite3.Error: the copy is damaged, or another process still writes.
        """
        beside = self._path.with_name(f".{FILE}.{os.getpid()}")
        undo = self._path.with_name(f"{FILE}-journal")
        copies = {self._path: beside, undo: beside.with_name(f"{beside.name}-journal")}
        try:
            for file, data in _of_one_moment(copies).items():
                copies[file].unlink(missing_ok=True)
                descriptor = os.open(copies[file], os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE)
                with open(descriptor, "wb") as into:
                    into.write(data)
            with contextlib.closing(sqlite3.connect(beside)) as rows:
                _check(rows)  # undoes what is in its journal
                rows.execute("PRAGMA journal_mode = DELETE")
            undo.unlink(missing_ok=True)
            beside.replace(self._path)
        finally:
            for copy in copies.values():
                copy.unlink(missing_ok=True)
        self.warnings = (
            f"another process had locked {self._path}: the master continues with a copy of it, "
            "which has taken its place. What that process writes into the former one is lost.",
        )

    def write(self, event: Event, state: State) -> None:
        """Keep a decision: the event, and the state after it.

        Raises:
            RunError: it cannot be written.
        """
        whole = int(self._rows_written % WHOLE_EVERY == 0)
        before = {} if whole else self._members
        new = {n: each for n, each in state.members.items() if before.get(n) is not each}
        gone = [n for n in before if n not in state.members]
        data = msgspec.msgpack.encode(_Row(replace(state, members=new), gone))
        try:
            self._rows.execute(
                "INSERT INTO decisions (time, event, whole, state) VALUES (?, ?, ?, ?)",
                (time.time(), repr(event), whole, _sealed(data, whole)),
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        self._members, self._rows_written = state.members, self._rows_written + 1

    def keep(self, key: str, value: bytes) -> None:
        """Keep a key.

        Raises:
            RunError: it cannot be written.
        """
        try:
            self._rows.execute(
                "INSERT OR REPLACE INTO keys VALUES (?, ?)", (key, _sealed(value, key))
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def forget(self, prefix: str) -> None:
        """Remove all keys that begin like this.

        Raises:
            RunError: it cannot be written.
        """
        try:
            self._rows.execute(
                "DELETE FROM keys WHERE substr(key, 1, ?) = ?", (len(prefix), prefix)
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def kept(self) -> list[tuple[str, bytes]]:
        """All keys, with their values.

        Raises:
            RunError: they cannot be read.
        """
        try:
            found = self._rows.execute("SELECT key, value FROM keys").fetchall()
            return [(key, _opened(value, key)) for key, value in found]
        except _DAMAGED as error:
            raise self._unusable(error) from None

    def last(self) -> State | None:
        """The state after the last decision; None if there is none.

        Raises:
            RunError: it cannot be read.
        """
        members, last = dict[int, Member](), None
        try:
            for whole, data in self._rows.execute(
                "SELECT whole, state FROM decisions "
                "WHERE number >= (SELECT MAX(number) FROM decisions WHERE whole) ORDER BY number"
            ):
                row = self._decoded(_opened(data, whole), _Row)
                last, members = row.state, members | row.state.members
                for number in row.gone:
                    if members.pop(number, None) is None:
                        raise _Changed("a row is missing")
        except _DAMAGED as error:
            raise self._unusable(error) from None
        return last and replace(last, members=members)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with contextlib.suppress(sqlite3.Error):  # closed before, or no room for it
            self._rows.execute("PRAGMA journal_mode = DELETE")  # leaves no file beside
        self._rows.close()

    def _decoded(self, data: bytes, kind: type[T]) -> T:
        """What a row has.

        Raises:
            RunError: it is not what this version writes.
        """
        try:
            return msgspec.msgpack.decode(data, type=kind, dec_hook=_made)
        except UNDECODABLE as error:
            raise RunError(self._of_another_version()) from error

    def _of_another_version(self) -> str:
        return (
            f"{self._path} was written by another version of instep, which began this session: its "
            "master's decisions cannot be read. Resume the run: a session that begins with this "
            "version writes its own."
        )

    def _unusable(self, error: Exception | str | None) -> RunError:
        text = f"{self._path} cannot be used: {error}. Make room, or get access to it."
        if isinstance(error, _DAMAGED) and not isinstance(error, sqlite3.OperationalError):
            text = f"{self._path} is damaged ({error}): the decisions of its master are lost."
        return RunError(gone(self._path.parent) or text)


def _of_one_moment(files: Iterable[Path]) -> dict[Path, bytes]:
    """What the files hold that are there, read until nobody has written meanwhile.

    Raises:
        sqlite3.OperationalError: another process still writes.
    """
    before = None
    for _ in range(1 + _TRIES):
        found = {file: read_plain(file) for file in files if file.exists()}
        if found == before:
            return found
        before = found
    raise sqlite3.OperationalError("another process goes on writing to it")


def _check(rows: sqlite3.Connection) -> None:
    (found,) = rows.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":  # rows may be missing
        raise sqlite3.DatabaseError(found.splitlines()[-1])


def _sealed(data: bytes, beside: object = "") -> bytes:
    """With its checksum before it, and that of what is in the row beside it."""
    return zlib.crc32(data, zlib.crc32(repr(beside).encode())).to_bytes(4, "little") + data


def _opened(sealed: object, beside: object = "") -> bytes:
    """The bytes of `_sealed`.

    Raises:
        _Changed: they are not.
    """
    if not isinstance(sealed, bytes) or _sealed(sealed[4:], beside) != sealed:
        raise _Changed("a row was changed")
    return sealed[4:]


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _made(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
