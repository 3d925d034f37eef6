"""The ledger on disk: which samples each committed step took, written as it commits.

One process writes it, that of rank 0, and writes a step before anything that
builds on it (a checkpoint, the next step). What a process has handed to the
system outlives its death, so a step that was committed is in the file whoever
is killed next. The file's lock says who may write; a writer that has let go of
it (`release`) never writes again. Readers are `events.read_records` and the audit.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from instep.errors import CheckpointError, RunError
from instep.events import LEDGER, LEDGER_START, check_ledger, ledger_header, read_records
from instep.plain_file import plain
from instep.store.folder import gone, lock, open_own, unlock

TIMEOUT_S = 2.0
"""How long a step waits for room: a checkpoint that fills the disk is taken away by its writer."""

LOCKED_S = 120.0
"""How long a writer on another host, cut off, may keep the file; NFS takes it from it after 90."""

_LOOK_AGAIN_S = 0.05
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Ledger:
    """Appends committed steps to a run's `ledger.bin`.

    Args:
        path: the file; created with its header if missing, appended to if not.
        wait: asked again and again whether to wait for another process that has the file;
            what it raises is raised.
        timeout_s: how long to wait for room on a full disk.

    Raises:
        RunError: it cannot be written, or is of another format.
    """

    def __init__(
        self,
        path: Path,
        wait: Callable[[], bool] = lambda: False,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._path, self._timeout_s = path, timeout_s
        try:
            self._file = open_own(path, "a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._take(wait)
            self._begin()
        except BaseException:
            self._file.close()
            raise
        self._use = threading.Lock()
        self._released = False
        self.size_bytes = self._file.seek(0, os.SEEK_END)
        """Up to where the committed steps stand."""

    def _take(self, wait: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LOCKED_S
        while not lock(self._file):
            if time.monotonic() > deadline or not wait():
                raise RunError(f"another process writes {self._path}. End it first.")
            time.sleep(0.02)

    def _begin(self) -> None:
        """Have the file begin as a ledger does, where its writer died with the header too."""
        try:
            if not check_ledger(self._path, os.pread(self._file.fileno(), LEDGER_START, 0)):
                os.truncate(self._path, 0)
                self._write(ledger_header())
        except OSError as error:
            raise self._unwritable(error) from None

    def append(self, shares: Sequence[tuple[int, ...]]) -> bytes:
        """Write one committed step: each worker's share, values in the order of `LEDGER`'s fields.

        Returns:
            The records as they were written; none after `release`.

        Raises:
            RunError: they cannot be written; the file ends with the step before. Or somebody
                has removed, renamed or changed it.
        """
        data = np.array(list(shares), LEDGER).tobytes()
        with self._use:
            if self._released:
                return b""
            try:
                self._check()
                self._write(data)
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(self.size_bytes)
                raise self._unwritable(error) from None
            self.size_bytes += len(data)
        return data

    def _check(self) -> None:
        """Refuse to write on where the file is not what was left, or not where others read it."""
        mine = os.fstat(self._file.fileno())
        try:
            there = os.path.samestat(mine, os.stat(self._path))
        except FileNotFoundError:
            there = False
        if not there:
            moved = f"{self._path} was removed, renamed or replaced while the run went on: "
            text = "what was trained on can no longer be told."
            raise RunError(gone(self._path.parent) or moved + text)
        if mine.st_size != self.size_bytes:
            raise RunError(
                f"{self._path} has {mine.st_size} bytes, and {self.size_bytes} were written: the "
                "file was cut or written to while the run went on, and what was trained on can no "
                "longer be told."
            )

    def _write(self, data: bytes) -> None:
        deadline = time.monotonic() + self._timeout_s
        while data:
            try:
                data = data[self._file.write(data) :]
            except OSError as error:
                if error.errno not in _FULL or time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)

    def cut(self, size_bytes: int) -> None:
        """Have the file end there.

        Raises:
            OSError: it cannot be written.
        """
        self._file.truncate(size_bytes)
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Write nothing more, and let others write; for another thread too."""
        with self._use:
            self._released = True
            unlock(self._file)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self.release()
        self._file.close()

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"{self._path} cannot be written: {error.strerror}. Make room, or get access; every "
            "step that was committed before is in it."
        )


def mend(
    path: Path,
    step: int,
    shares: Sequence[tuple[int, ...]],
    wait: Callable[[], bool] = lambda: False,
) -> None:
    """Make a ledger end with `step`, whose writer may have died before or after writing it.

    Args:
        path: the file; nobody writes it now, or not for long.
        step: the last one that counts.
        shares: its records, values in the order of `LEDGER`'s fields.
        wait: as for `Ledger`.

    Raises:
        RunError: it cannot be written.
    """
    ledger = Ledger(path, wait)
    try:
        records = read_records(path, LEDGER)
        later = np.flatnonzero(records["step"] > step)
        if len(later):  # a step that nobody who is left has committed
            records = records[: later[0]]
        ledger.cut(LEDGER_START + records.nbytes)
        if step and (not len(records) or int(records["step"][-1]) < step):
            ledger.append(shares)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        ledger.close()


def last_step(path: Path) -> int:
    """The last step in a ledger, of which only the end is read; 0 where there is none."""
    try:
        with open(path, "rb", opener=plain) as file:
            records = (file.seek(0, os.SEEK_END) - LEDGER_START) // LEDGER.itemsize
            if records <= 0:
                return 0
            file.seek(LEDGER_START + (records - 1) * LEDGER.itemsize)
            tail = file.read(LEDGER.itemsize)
    except OSError:
        return 0
    return int(np.frombuffer(tail, LEDGER)["step"][0]) if len(tail) == LEDGER.itemsize else 0


def check_reaches(path: Path, size_bytes: int) -> None:
    """Refuse a file that does not reach to where it was when a checkpoint was saved.

    Raises:
        CheckpointError: steps before the checkpoint are missing.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < size_bytes:
        raise CheckpointError(
            f"{path} has {size} bytes, but the checkpoint was saved with {size_bytes}: the file "
            "was cut or replaced, and what was trained on can no longer be told."
        )


def cut_back(path: Path, size_bytes: int) -> None:
    """Take back what was written after a checkpoint: the file ends at `size_bytes` again.

    Its header stays, where the run begins anew too (`size_bytes` is 0).

    Raises:
        RunError: it cannot be written.
    """
    try:
        end = max(size_bytes, LEDGER_START)
        if path.exists() and path.stat().st_size > end:
            os.truncate(path, end)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}. Get access to it.") from None
