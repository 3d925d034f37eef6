"""The ledger on disk: which samples each committed step took, written as it commits.

The process of rank 0 writes it, and writes a step before anything that builds on it (a
checkpoint, the next step). What a process has written survives its death, so a committed
step is in the file whichever process is killed next. The writer holds the file's lock; a
writer that has released it never writes again. Readers are `events.read_records` and the
audit.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from instep.errors import CheckpointError, RunError
from instep.events import LEDGER, LEDGER_START, check_ledger, ledger_header, read_records
from instep.plain_file import plain
from instep.store.own_files import gone, lock, open_own, unlock

TIMEOUT_S = 2.0
"""How long to wait for disk space: a checkpoint that fills the disk is removed by its writer."""

LOCKED_S = 120.0
"""How long a cut-off writer on another host may keep the lock; NFS breaks it after 90 s."""

_ROW = struct.Struct("<qiIiiHIqq")
"""A record of `LEDGER`: numpy takes ten times as long to make a few of them."""

assert _ROW.size == LEDGER.itemsize, "the fields of a record"

_LOOK_AGAIN_S = 0.05
_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Ledger:
    """Appends committed steps to a run's `ledger.bin`.

    Args:
        path: the file; created with its header if missing, appended to if not.
        wait: called repeatedly while another process has the lock; says whether to wait, and
            may raise.
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
        own = os.fstat(self._file.fileno())
        self._identity = own.st_dev, own.st_ino
        self._use = threading.Lock()
        self._released = False
        self.size_bytes = self._file.seek(0, os.SEEK_END)
        """Where the committed steps end."""
        self._summed = 0, 0  # how far, and the CRC-32 of that

    def _take(self, wait: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LOCKED_S
        while not lock(self._file):
            if time.monotonic() > deadline or not wait():
                raise RunError(f"another process writes {self._path}. End it first.")
            time.sleep(0.02)

    def _begin(self) -> None:
        """Write the header, if the file has none or a part of it."""
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
            RunError: they cannot be written, and the file ends with the step before; or the file
                was removed, renamed or changed.
        """
        data = b"".join(_ROW.pack(*share) for share in shares)
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

    def crc32(self) -> int:
        """Of the file up to `size_bytes`; what was not summed up before is read.

        Raises:
            RunError: it cannot be read.
        """
        at, crc = self._summed
        try:
            self._file.seek(at)
            crc = _crc32(self._file, self.size_bytes - at, crc)
        except OSError as error:
            raise RunError(f"{self._path} cannot be read: {error.strerror}.") from None
        self._summed = self.size_bytes, crc
        return crc

    def _check(self) -> None:
        """Refuse to write to a file that was changed, or that is no longer at its path."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            moved = f"{self._path} was removed, renamed or replaced during the run: "
            text = "what was trained on is no longer known."
            raise RunError(gone(self._path.parent) or moved + text)
        if found.st_size != self.size_bytes:
            raise RunError(
                f"{self._path} has {found.st_size} bytes, and {self.size_bytes} were written: the "
                "file was changed by another process, and what was trained on is no longer known."
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
        """Truncate the file.

        Raises:
            OSError: it cannot be written.
        """
        self._file.truncate(size_bytes)
        self.size_bytes = size_bytes
        if self._summed[0] > size_bytes:
            self._summed = 0, 0

    def while_held(self, write: Callable[[], None]) -> bool:
        """Write to a file beside this one, unless another process may write by now; whether it
        was written."""
        with self._use:
            if not self._released:
                write()
            return not self._released

    def release(self) -> None:
        """Write nothing more, and unlock the file; other threads may call it."""
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
    """Make a ledger end with `step`; its writer may have died before or after writing that step.

    Args:
        path: the file; its former writer is gone, or soon will be.
        step: the last committed step.
        shares: its records, values in the order of `LEDGER`'s fields.
        wait: as for `Ledger`.

    Raises:
        RunError: it cannot be written.
    """
    ledger = Ledger(path, wait)
    try:
        records = read_records(path, LEDGER)
        later = np.flatnonzero(records["step"] > step)
        if len(later):  # no surviving worker has committed these
            records = records[: later[0]]
        ledger.cut(LEDGER_START + records.nbytes)
        if step and (not len(records) or int(records["step"][-1]) < step):
            ledger.append(shares)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        ledger.close()


def last_step(path: Path) -> int:
    """The last step in a ledger, of which only the end is read; 0 if there is none."""
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
    """Refuse a file that is shorter than when a checkpoint was saved.

    Raises:
        CheckpointError: steps before the checkpoint are missing.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < size_bytes:
        raise CheckpointError(
            f"{path} has {size} bytes, but the checkpoint was saved with {size_bytes}: the file "
            "was cut or replaced, and what was trained on is no longer known."
        )


def check_intact(path: Path, size_bytes: int, crc32: int) -> None:
    """Refuse a file whose begin is not what it was when a checkpoint was saved.

    Raises:
        RunError: it is damaged, or cannot be read.
    """
    if not is_intact(path, size_bytes, crc32):
        raise RunError(
            f"{path} is damaged: what was written before the newest checkpoint does not match the "
            "checksum there. Nothing was changed. Restore it from a copy, or move that checkpoint "
            "away to resume from an earlier one."
        )


def is_intact(path: Path, size_bytes: int, crc32: int) -> bool:
    """Whether a file begins as it was when a checkpoint was saved.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open(path, "rb", opener=plain) as file:
            return _crc32(file, size_bytes) == crc32
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}. Get access to it.") from None


def _crc32(file: IO[bytes], count: int, crc: int = 0) -> int:
    """Of so many bytes that follow in a file, or of those that there are."""
    while data := file.read(min(count, _CHUNK_BYTES)):
        crc, count = zlib.crc32(data, crc), count - len(data)
    return crc


def cut_back(path: Path, size_bytes: int) -> None:
    """Discard what was written after a checkpoint: the file ends at `size_bytes` again.

    The header stays, even if `size_bytes` is 0.

    Raises:
        RunError: it cannot be written.
    """
    try:
        end = max(size_bytes, LEDGER_START)
        if path.exists() and path.stat().st_size > end:
            os.truncate(path, end)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}. Get access to it.") from None
