"""What happened, as data: one line per event, and one record per step.

Low parts emit, high parts read. A run writes three files in its folder:

`events.jsonl`   rare things, one JSON object a line: `time` (Unix seconds),
                 `event` (a name from `EVENTS`), that event's fields, and `crc32`
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

from instep.checksums import line_of, tables_of
from instep.errors import RunError
from instep.formats import FORMAT, INSTEP, other_format
from instep.plain_file import plain

_CHUNK_BYTES = 1 << 16


class Kind(IntEnum):
    """The kind of unit of work in a record of the ledger."""

    RANGE = 0
    """A range of the global batch: consecutive micro-batches."""


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

Today there is one `Kind`, and one record for each worker and step, whose range is all of
the worker's work; it is empty for a worker without work. In a round of
averaging in which the members changed, a worker may have several. A strategy that divides work
differently gets a kind of its own, and then one record for each unit.
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

EVENTS = {
    "run_started": "job, command, host, recipe_sha256, versions, started_by (instep, or join); "
    "resumed_step if it was resumed; encrypted (traffic between hosts) if there are other machines",
    "worker_joined": "worker, role (worker, or server), pid, host, seconds",
    "master_started": "pid, again (whether it replaces a lost one), why (that one was lost)",
    "host_joined": "pid, host",
    "host_lost": "host, why",
    "host_given_back": "host",
    "hosts_added": "hosts (numbers), workers (how many more the run has while they are there)",
    "hosts_leaving": "hosts (numbers), why",
    "scaled": "before, workers, hosts (those that come or leave; else a user wants it)",
    "worker_leaving": "worker, successor, fellows (with a mesh: the other workers of its replica, "
    "which leave with it)",
    "worker_hung": "worker, step, phase, how, where",
    "generation_started": "generation, members, reason, seconds",
    "worker_ready": "worker, device, threads, parameters, samples, validation_samples, last_step, "
    "loader, phases (name to seconds, from the start of `instep run` on)",
    "model_loaded": "path, matched, missing (names), unexpected (names), wrong (name to why), "
    "sha256, text",
    "lora_added": "layers (names), trained, total (values of parameters), text",
    "trial_progress": "worker, done, of (comparisons of micro-batches with whole batches)",
    "passes_chosen": "worker, merged, reason",
    "same_as_one_machine": "verdict (yes; no: what differs; not shown: why), step (that "
    "has changed the verdict: by its batch, or a callback after it; else left out)",
    "work_dealt": "generation, step (the first with this distribution), members, micro_batches "
    "(of each), speeds (of each; their ratios count), reason (speed, or trial)",
    "loaders_started": "worker, pids (of its loader processes; a killed one is replaced)",
    "dataset_known": "dataset (training, validation), samples, contents (index, content), "
    "differed (indices of samples that were different when read again); shards (size, how many) of "
    "the windowed order, and parts (at which shards they begin and end); prepared (folders that "
    "the training set is made of, each with its sha256)",
    "data_divided": "partition, sizes (samples of each participant), validation_sizes (the same; "
    "empty if it is not divided), digest (of who has which samples), labels (how often each label "
    "is with each participant; empty if they are not known, or too many)",
    "parts_placed": "sizes (samples of each part), held (of each worker by number, how many "
    "samples of each part lie on its host)",
    "samples_given": "worker, step, samples, bytes (that other workers have got from it so far)",
    "data_split": "split, samples (of the dataset), train and validation (samples of each side), "
    "fold and folds (0 and 0 without), digests (of which samples are on each side), looked_at "
    "(samples of each side whose contents were compared; not when a run is resumed), duplicates "
    "(of those to validate on, how many are trained on too), example (one, and its twin), classes "
    "(how often each label is on each side, where the split needs labels)",
    "sample_skipped": "worker, generation, dataset (training, validation), epoch, index, step, "
    "cause",
    "traffic": "worker, sent_bytes, received_bytes (since the start, counted by the kernel)",
    "participants_apart": "step, distance, way, divergence",
    "lag_measured": "step, updates (since the last such event), mean, largest (of their lag)",
    "epoch_finished": "epoch, step, loss, samples",
    "validated": "step, epoch, metrics (name to value), samples, skipped, seconds, scheduled",
    "logged": "step, values (name to value, of callbacks; or learning rates that the step used, "
    "where they have changed; null if a value is not finite)",
    "participants_validated": "step, metrics (name to the value of each participant; null for one "
    "without samples)",
    "mesh_checked": "tensors (gradients that were compared with those of one process), distance "
    "(the largest, relative to what is allowed, times 1e-5), blocks (that alone were compared; "
    "empty if all were); or why (nothing was compared)",
    "checkpoint_saved": "step, path, size_bytes, held_s, seconds",
    "checkpoint_copied": "step, url, size_bytes, seconds",
    "copies_resumed": "url, seconds (for which no checkpoint could be copied there)",
    "model_saved": "step, path, parameters_sha256, size_bytes",
    "stop_requested": "by, rule, step, why",
    "worker_failed": "worker, step, phase, kind, cause, where, line",
    "worker_lost": "worker, step, cause, restarted (with a mesh: the other workers of its replica, "
    "which are started again with it)",
    "replica_waits": "replica, workers (its processes, which wait), missing (those that are not "
    "there; other replicas train without this one)",
    "corruption_found": "step, workers (numbers of the wrong ones), suspects (numbers, if it "
    "is not known which), what (parameter, state, gradient), where, how, clean_step (from "
    "which the run continues; -1 if no worker has a copy: a went_back follows)",
    "taken_from_host": "replica, step (a replica that was started again continues from the memory "
    "of its host: no other had the state)",
    "went_back": "resumed_step, path (of a checkpoint: no worker with the current state was left)",
    "process_ended": "worker, pid, code",
    "warning": "text",
    "run_finished": "outcome (completed, stopped, failed, interrupted), rule, step, seconds, why "
    "(only if it is not what its master took it for)",
}
"""Every event, with its fields."""

_NEEDED = {
    "worker_joined": ("worker",),
    "scaled": ("workers",),
    "generation_started": ("members",),
    "worker_ready": ("worker", "samples"),
    "dataset_known": ("dataset", "samples", "contents", "differed"),
    "data_divided": ("sizes", "digest"),
    "parts_placed": ("sizes", "held"),
    "samples_given": ("worker", "step", "samples", "bytes"),
    "data_split": ("samples", "train", "validation", "fold", "folds", "digests"),
    "sample_skipped": ("generation", "dataset", "epoch", "index", "step"),
    "traffic": ("worker", "sent_bytes", "received_bytes"),
    "participants_apart": ("step",),
    "lag_measured": ("step", "updates", "mean", "largest"),
    "epoch_finished": ("epoch", "step", "loss", "samples"),
    "validated": ("step", "metrics"),
    "logged": ("step", "values"),
    "participants_validated": ("step", "metrics"),
    "checkpoint_saved": ("step",),
    "checkpoint_copied": ("step",),
    "model_saved": ("step", "parameters_sha256"),
    "stop_requested": ("rule", "step"),
    "worker_failed": ("worker",),
    "corruption_found": ("step", "workers", "suspects", "what", "where", "how", "clean_step"),
    "worker_lost": ("worker",),
    "taken_from_host": ("replica", "step"),
    "went_back": ("resumed_step",),
    "run_finished": ("outcome",),
}
"""Fields that readers need; None counts as absent."""

_WHOLE, _NUMBER, _TEXT, _LIST, _TABLE = (int,), (int, float), (str,), (list,), (dict,)
_WORDS: dict[tuple[type, ...], str] = {
    _WHOLE: "not a whole number",
    _NUMBER: "not a number",
    _TEXT: "not text",
    _LIST: "not a list",
    _TABLE: "not a table",
}
_COUNTS: dict[str, tuple[type, ...]] = dict.fromkeys(
    [
        *("step", "resumed_step", "clean_step", "last_step", "epoch", "index", "worker", "replica"),
        *("generation", "samples", "validation_samples", "skipped", "parameters"),
        *("sent_bytes", "received_bytes", "size_bytes", "updates", "largest"),
    ],
    _WHOLE,
) | dict.fromkeys(["time", "seconds", "held_s", "mean"], _NUMBER)
_KINDS = _COUNTS | {
    **dict.fromkeys(["loss"], _NUMBER),
    **dict.fromkeys(["outcome", "rule", "why", "dataset", "parameters_sha256"], _TEXT),
    **dict.fromkeys(["verdict", "text", "cause", "reason", "started_by"], _TEXT),
    **dict.fromkeys(["suspects", "sizes", "contents", "differed", "members"], _LIST),
    **dict.fromkeys(["metrics", "values", "phases", "versions", "job"], _TABLE),
}
"""Type of a field in every known event that has it; None means unknown."""

_OWN_KINDS = {
    ("scaled", "workers"): _WHOLE,
    ("corruption_found", "workers"): _LIST,
    ("worker_joined", "pid"): _WHOLE,
    ("worker_joined", "host"): _WHOLE,
    **{("data_split", name): _WHOLE for name in ("train", "validation", "fold", "folds")},
    **{("data_split", name): _LIST for name in ("digests", "looked_at", "example", "classes")},
    ("data_split", "duplicates"): _WHOLE,
    ("dataset_known", "prepared"): _LIST,
    ("data_divided", "labels"): _LIST,
}
_FAR = 1 << 63  # we never write larger numbers, and no array can hold them


def wrong_in(event: Any) -> str:
    """Why the value of a line is not a valid event; empty if it is one.

    Additional fields, and events with other names, are ignored.
    """
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return "there is no event"
    when, name = event.get("time"), event["event"]
    if not isinstance(when, int | float) or not abs(when) < _FAR:  # NaN is not either
        return "the event has no time"
    for field in _NEEDED.get(name, ()):
        if event.get(field) is None:
            return f"{name} has no {field}"
    kinds = _KINDS if name in EVENTS else _COUNTS
    for field, value in event.items():
        kind = kinds.get(field) or _OWN_KINDS.get((name, field))
        if kind is None or value is None:
            continue
        number: Any = value if field in _COUNTS else 0
        if not isinstance(value, kind) or not -_FAR < number < _FAR:
            return f"{field} is {repr(value)[:80]}, which is {_WORDS[kind]}"
    for part, value in (event.get("phases") or {}).items() if name == "worker_ready" else ():
        if not isinstance(value, int | float) or not abs(value) < _FAR:
            return f"phases.{part} is {repr(value)[:80]}, which is not a number"
    return ""


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
