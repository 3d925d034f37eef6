"""What happened, as data: one line per event, and one record per step.

Low parts emit, high parts read. A run writes three files in its folder:

`events.jsonl`   rare things, one JSON object a line: `time` (Unix seconds),
                 `event` (a name from `vocabulary.EVENTS`), that event's fields, and `crc32`
`ledger.bin`     which worker trained on which positions of which epoch, in which
                 committed step: records of `LEDGER`, appended, never changed
`steps.bin`      how long each part of a step took: records of `STEPS`

Both binary files are plain arrays of little-endian records. The ledger has a header of
`LEDGER_START` bytes before them, which contains its format. So
`numpy.fromfile("ledger.bin", LEDGER, offset=LEDGER_START)` is the whole reader.
Several workers write into one file; records of one step need not be adjacent.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import numpy as np

from instep.checksums import line_of, table_of, tables_of
from instep.errors import RunError
from instep.formats import FORMAT, INSTEP, other_format
from instep.growing_file import Rewritten, Tail
from instep.plain_file import plain
from instep.vocabulary import EVENTS

_CHUNK_BYTES = 1 << 16


class Kind(IntEnum):
    """The kind of unit of work in a record of the ledger."""

    RANGE = 0
    """A range of the global batch: consecutive micro-batches."""

    AWAY = 1
    """Data that a participant would have taken in a round that was without it: its host was lost.
    The worker is one of those that took the round."""


LEDGER = np.dtype(
    [
        ("step", "<i8"),  # counts from 1
        ("epoch", "<i4"),  # counts from 0
        ("course", "<u4"),  # 0; reserved for the number of times that the run went back
        ("generation", "<i4"),  # counts from 1
        ("worker", "<i4"),
        ("kind", "<u2"),  # kind of the unit: a `Kind`
        ("unit", "<u4"),  # its number in the step; for a range, that of its first micro-batch
        ("first", "<i8"),  # positions [first, stop) of the epoch's order
        ("stop", "<i8"),
    ]
)
"""A unit of work in one committed step, and the worker that did it.

There is one record for each worker and step, whose range is all of the worker's work; it is empty
for a worker without work. In a round of averaging in which the members changed, a worker may have
several, and where participants have data of their own there is one for each of these.
"""

_HEADER = struct.Struct(
    "<8sII12s"
)  # magic, format, bytes of a record, version of instep that wrote it
_MAGIC = b"\x93instepL"

LEDGER_START = _HEADER.size + 4
"""Offset of the first record of a ledger, in bytes; before it the header and its CRC-32."""


def ledger_header() -> bytes:
    """The header of a ledger, [LEDGER_START] bytes. Later formats keep its layout."""
    header = _HEADER.pack(_MAGIC, FORMAT, LEDGER.itemsize, INSTEP.encode()[:12])
    return header + zlib.crc32(header).to_bytes(4, "little")


def check_ledger(path: Path, start: bytes) -> bool:
    """Check the header of a ledger before its records are used.

    Args:
        path: the file, for messages.
        start: its first `LEDGER_START` bytes, or fewer if the file is shorter.

    Returns:
        Whether the header is complete; if not, its writer was killed, and no record follows.

    Raises:
        RunError: it is of another format, damaged, or no ledger.
    """
    whole = len(start) >= LEDGER_START
    if not whole and ledger_header()[: _HEADER.size - 12].startswith(start[: _HEADER.size - 12]):
        return False
    header, checksum = start[: _HEADER.size], start[_HEADER.size : LEDGER_START]
    if not whole or not header.startswith(_MAGIC):
        if start.startswith((1).to_bytes(8, "little")):  # as the first record did in format 1
            raise RunError(other_format(path, 1))
        raise RunError(
            f"{path} is not a ledger of instep, or it is damaged: its header is wrong. "
            "Restore it from a copy."
        )
    _, found, record_bytes, writer = _HEADER.unpack(header)
    if zlib.crc32(header).to_bytes(4, "little") != checksum:
        raise RunError(
            f"{path} is damaged: its header does not match its checksum. Restore it from a copy."
        )
    if found != FORMAT:
        raise RunError(other_format(path, found, writer.rstrip(b"\0").decode("ascii", "replace")))
    assert record_bytes == LEDGER.itemsize, f"format {found} with records of {record_bytes} bytes"
    return True


STEPS = np.dtype(
    [
        ("step", "<i8"),
        ("worker", "<i4"),
        ("samples", "<i4"),  # of this worker
        ("loss", "<f8"),  # mean over the whole global batch, equal on every worker
        ("begin", "<f8"),  # Unix seconds
        ("load_s", "<f4"),  # waiting for the samples
        ("forward_s", "<f4"),
        ("backward_s", "<f4"),  # includes the exchange that overlaps it
        ("wait_s", "<f4"),  # waiting until the slowest peer was ready to exchange
        ("wire_s", "<f4"),  # from then until the summed gradient arrived
        ("update_s", "<f4"),  # clipping, optimizer, scheduler
        ("save_s", "<f4"),  # training paused by a checkpoint
        ("gradient_norm", "<f4"),  # of the summed gradient, before clipping; NaN if not needed
    ]
)
"""Where one worker's time went in one step, in order, and the step's results."""

CONTENTS = np.dtype([("epoch", "<i8"), ("index", "<i8"), ("content", "<i8")])
"""One sample as a step used it; `content` is a hash of 63 bits."""


class Appender:
    """Appends to a file of a run; survives a disk that is full for a while.

    Data that cannot be written is kept and written first at the next call, so
    nothing is lost or torn in the middle. Thread-safe.

    Args:
        path: the file; created if missing.
        most_held: the most bytes to keep.

    Raises:
        RunError: it cannot be opened.
    """

    def __init__(self, path: Path, *, most_held: int = 1 << 20) -> None:
        self._path, self._most = path, most_held
        self._held = b""
        self._lock = threading.Lock()
        try:
            self._file = open(path, "ab", buffering=0, opener=plain)  # noqa: SIM115 closed by close
        except OSError as error:
            raise _unwritable(path, error) from None

    def write(self, data: bytes) -> None:
        """Write the data kept so far, then `data`, as far as possible.

        Raises:
            RunError: it cannot be written, and more than `most_held` bytes are kept.
        """
        with self._lock:
            self._held += data
            try:
                while self._held:
                    self._held = self._held[self._file.write(self._held) :]
            except OSError as error:
                if len(self._held) > self._most:
                    raise _unwritable(self._path, error) from None

    def close(self) -> None:
        """Close the file; data that could not be written is lost. A second call does nothing."""
        if not self._file.closed:
            with suppress(RunError):
                self.write(b"")
            self._file.close()


class EventLog:
    """Appends events to a file as they happen; a line is complete or absent.

    Args:
        path: the file; created with its first line, appended to if it exists. A last
            line that a crash cut short is removed first.

    Raises:
        RunError: it cannot be opened or repaired.
    """

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._file = Appender(path)

    def emit(self, name: str, **fields: Any) -> dict[str, Any]:
        """Write one event now and return it as read back from the file.

        Raises:
            RunError: events could not be written for a while, and too many are waiting.
        """
        assert name in EVENTS, f"{name} is not in EVENTS"
        event = {"time": time.time(), "event": name, **fields}
        self._file.write(line_of(event))
        return event

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be written: {error.strerror}. Make room, or get access; the committed "
        "steps are in the ledger."
    )


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last complete line of a text file, if there is such a file.

    Raises:
        RunError: it cannot be written.
    """
    _cut(path, _end_of_lines)


def _cut(path: Path, end: Callable[[IO[bytes]], int]) -> None:
    if not path.exists():
        return
    try:
        with open(path, "r+b", opener=plain) as file:
            file.truncate(end(file))
    except OSError as error:
        raise _unwritable(path, error) from None


def _end_of_lines(file: IO[bytes]) -> int:
    """Bytes up to the end of the last complete line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _CHUNK_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def cut_torn_record(path: Path, dtype: np.dtype[Any]) -> None:
    """Remove what follows the last complete record of a binary file, if there is such a file.

    Raises:
        RunError: it cannot be written.
    """
    _cut(path, lambda file: _end_of_records(file, dtype.itemsize))


def _end_of_records(file: IO[bytes], size: int, start: int = 0) -> int:
    """Bytes up to the end of the last record.

    A torn record at the end does not count, and neither do zeros: a failed disk or a power loss
    leaves zeros where a file had grown, and no record is all zeros.
    """
    end = file.seek(0, os.SEEK_END)
    end -= (end - start) % size
    while end > start:
        file.seek(end - size)
        if any(file.read(size)):
            break
        end -= size
    return end


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line of an events file, oldest first; none if there is no file.

    A last line that a crash cut short is left out.

    Raises:
        ValueError: a line is not JSON, does not match its checksum, or has none though one
            before it has.
    """
    if not path.exists():
        return
    with open(path, "rb", opener=plain) as lines:
        yield from tables_of(lines)


class NewEvents:
    """Events of a run that is under way, each once, as often as one looks.

    Args:
        run: its folder, which may come later.
    """

    def __init__(self, run: Path) -> None:
        self._file = Tail(run / "events.jsonl")

    def read(self) -> Iterator[dict[str, Any]]:
        """Those written since the last call.

        A damaged line is left out, and nothing is new in a file that cannot be read. A file that
        was replaced is read again from its beginning.
        """
        with suppress(OSError):
            while data := self._new():
                for line in data.splitlines():
                    with suppress(ValueError):
                        event = table_of(line)
                        if isinstance(event, dict) and isinstance(event.get("event"), str):
                            yield event

    def _new(self) -> bytes:
        try:
            return self._file.new()
        except Rewritten:
            self._file.rewind()
            return self._file.new()


def read_records(path: Path, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Every complete record of a binary file, [records] of `dtype`; a torn last one is left out.

    Raises:
        RunError: it is a ledger, and `check_ledger` refuses it.
    """
    if not path.exists():
        return np.empty(0, dtype)
    with open(path, "rb", opener=plain) as file:
        start = LEDGER_START if dtype == LEDGER else 0
        if dtype == LEDGER and not check_ledger(path, file.read(start)):
            return np.empty(0, dtype)
        end = _end_of_records(file, dtype.itemsize, start)
        file.seek(start)
        return np.frombuffer(file.read(end - start), dtype)
