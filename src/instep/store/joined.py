"""Parts of predictions put together to one file, each sample once and in the order of the dataset.

Rows are copied as bytes: no number is computed again, and no tensor has to fit into memory. A
sample that was skipped keeps its place: NaN (0 for whole numbers) in a tensor, and its cause
instead of outputs in a `.jsonl`; shards leave it out. Nothing here knows models or torch. Way in:
`publish`.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from instep.errors import DataError, RecipeError, RunError
from instep.store.predictions import SHARDS, Damaged, Part, Predictions
from instep.words import plural


class NumberType(NamedTuple):
    """A number type."""

    name: str
    numpy: str
    """How numpy writes it; empty where it has none."""
    size: int
    """Bytes of a value."""


TYPES = {
    "F64": NumberType("float64", "<f8", 8),
    "F32": NumberType("float32", "<f4", 4),
    "F16": NumberType("float16", "<f2", 2),
    "BF16": NumberType("bfloat16", "", 2),
    "I64": NumberType("int64", "<i8", 8),
    "I32": NumberType("int32", "<i4", 4),
    "I16": NumberType("int16", "<i2", 2),
    "I8": NumberType("int8", "|i1", 1),
    "U8": NumberType("uint8", "|u1", 1),
    "BOOL": NumberType("bool", "|b1", 1),
}
"""The number types that can be written, by safetensors' names."""

SKIPPED = "skipped_samples"
"""The tensor of the samples that were skipped, if there are any: [count] int64."""

_NAN = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_NAN_BF16 = b"\xc0\x7f"


class Published(NamedTuple):
    """What was written."""

    samples: int
    outputs: dict[str, dict[str, Any]]
    """Of each output `dtype` and `shape`; of a `.jsonl` none."""
    skipped: list[tuple[int, str]]
    """Samples without predictions, and why."""


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse outputs that cannot be rows of one tensor, by the heads of two parts.

    Raises:
        RecipeError: names the output, and both shapes.
    """
    if one["columns"] is None or other["columns"] is None:
        return  # every sample was skipped
    mine, theirs = ({n: c[:2] for n, c in head["columns"].items()} for head in (one, other))
    if mine == theirs:
        return
    name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
    said = [_said(one["batch"], mine.get(name)), _said(other["batch"], theirs.get(name))]
    raise RecipeError(
        f"predict gives rows that do not fit into one tensor: the output {name!r} {said[0]}, and "
        f"{said[1]}. Pad them to one length, or name an --out that ends in .jsonl."
    )


def _said(batch: int, column: list[Any] | None) -> str:
    if column is None:
        return f"is not there in batch {batch}"
    return f"has rows of shape {column[1]} ({TYPES[column[0]].name}) in batch {batch}"


def publish(folder: Predictions, samples: int, batch: int) -> Published:
    """Write the file of all predictions, all at once, and remove the parts.

    Args:
        folder: has a part for every batch.
        samples: in the dataset.
        batch: samples of a batch.

    Raises:
        Damaged: a part is not what was written; its batch is to be predicted again.
        DataError: no sample could be read.
        RecipeError: the outputs do not fit together.
        RunError: the file cannot be written.
    """
    suffix = folder.out.suffix
    parts = _Parts(folder, samples, batch)
    temporary = folder.path / f".joined.{os.getpid()}"
    try:
        if suffix == SHARDS:
            from instep.store.predicted_shards import write_shards  # needs pyarrow

            parts.look()
            shards = write_shards(folder.path / "shards", parts, parts.outputs(), parts.made_by())
            shards.replace(folder.out)
        elif suffix == ".jsonl":
            with temporary.open("wb") as file:
                for part in parts:
                    file.writelines(_lines(part))
        else:
            parts.look()
            with temporary.open("wb") as file:
                (_write_npz if suffix == ".npz" else _write_safetensors)(parts, file)
        if suffix != SHARDS:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(folder.out)
    except OSError as error:
        raise RunError(
            f"{folder.out} cannot be written: {error.strerror}. The predictions are in "
            f"{folder.path}: make room, and give the same command again."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    folder.remove()
    outputs = {
        name: {"dtype": TYPES[kind].name, "shape": [samples, *shape]}
        for name, (kind, shape) in parts.columns.items()
    }
    return Published(samples, outputs, parts.skipped)


class _Parts:
    """All parts in order; each is checked when it is read."""

    def __init__(self, folder: Predictions, samples: int, batch: int) -> None:
        self._folder, self.samples, self._batch = folder, samples, batch
        self.columns: dict[str, tuple[str, list[int]]] = {}
        """Outputs by name: type, and the shape of a row."""
        self.skipped: list[tuple[int, str]] = []

    def __iter__(self) -> Iterator[Part]:
        due, self.skipped = 0, []
        for number in range(-(-self.samples // self._batch)):
            part = self._folder.read(number)
            due_stop = min(due + self._batch, self.samples)
            if (part.head["first"], part.head["stop"]) != (due, due_stop):
                raise Damaged(number)
            self.skipped += [(sample, cause) for sample, cause in part.head["skipped"]]
            due = due_stop
            yield part
        if len(self.skipped) == self.samples:
            sample, cause = self.skipped[0]
            raise DataError(
                f"none of the {plural(self.samples, 'sample')} can be read; of sample {sample}: "
                f"{cause}"
            )

    def look(self) -> None:
        """Read all parts once: what the outputs are, and that they fit together."""
        known: dict[str, Any] | None = None
        for part in self:
            if part.head["columns"] is None:
                continue
            if known is None:
                known = part.head
                found = part.head["columns"].items()
                self.columns = {name: (kind, shape) for name, (kind, shape, _) in found}
            else:
                check_same(known, part.head)

    def outputs(self) -> dict[str, tuple[np.dtype[Any], list[int]]]:
        """Outputs by name: the type as numpy has it, and the shape of a row."""
        return {
            name: (np.dtype(TYPES[kind].numpy), shape)
            for name, (kind, shape) in self.columns.items()
        }

    def made_by(self) -> dict[str, Any]:
        """Plan of the command, for a manifest."""
        found: dict[str, Any] = msgspec.to_builtins(self._folder.plan())
        return {"predict": found}

    def rows(self, name: str) -> Iterator[bytes]:
        """The rows of an output, a batch at a time, with those of skipped samples filled."""
        kind, shape = self.columns[name]
        size = TYPES[kind].size * int(np.prod(shape, dtype=np.int64))
        for part in self:
            first, stop = part.head["first"], part.head["stop"]
            begin = part.head["columns"][name][2] if part.head["columns"] is not None else 0
            own = memoryview(part.body)[begin : begin + size * part.rows]
            skipped = {sample for sample, _ in part.head["skipped"]}
            if not skipped:
                yield bytes(own)
                continue
            blank, at, filled = _blank(kind, size), 0, bytearray()
            for sample in range(first, stop):
                if sample in skipped:
                    filled += blank
                else:
                    filled += own[at : at + size]
                    at += size
            yield bytes(filled)


def _blank(kind: str, size: int) -> bytes:
    if kind == "BF16":
        return _NAN_BF16 * (size // 2)
    value = np.array(np.nan, _NAN[kind]).tobytes() if kind in _NAN else b"\0"
    return value * (size // len(value))


def _write_safetensors(parts: _Parts, file: IO[bytes]) -> None:
    names = sorted(parts.columns, key=lambda name: (-TYPES[parts.columns[name][0]].size, name))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    if parts.skipped:
        at = 8 * len(parts.skipped)
        shape = [len(parts.skipped)]
        table[SKIPPED] = {"dtype": "I64", "shape": shape, "data_offsets": [0, at]}
    for name in names:
        kind, row = parts.columns[name]
        shape = [parts.samples, *row]
        size = TYPES[kind].size * int(np.prod(shape, dtype=np.int64))
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    file.write(_skipped(parts).tobytes())
    for name in names:
        file.writelines(parts.rows(name))


def _write_npz(parts: _Parts, file: IO[bytes]) -> None:
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        if parts.skipped:
            with archive.open(f"{SKIPPED}.npy", "w") as entry:
                np.lib.format.write_array(entry, _skipped(parts))
        for name, (kind, row) in parts.columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                facts = {"descr": TYPES[kind].numpy, "fortran_order": False}
                shape = {"shape": (parts.samples, *row)}
                np.lib.format.write_array_header_1_0(entry, {**facts, **shape})
                for rows in parts.rows(name):
                    entry.write(rows)


def _skipped(parts: _Parts) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([sample for sample, _ in parts.skipped], dtype="<i8")


def _lines(part: Part) -> Iterator[bytes]:
    """The lines of a part, with one for each sample that was skipped."""
    skipped = dict(part.head["skipped"])
    own = iter(part.body.splitlines(keepends=True))
    for sample in range(part.head["first"], part.head["stop"]):
        if sample in skipped:
            yield json.dumps({"sample": sample, "skipped": skipped[sample]}).encode() + b"\n"
        else:
            yield next(own)
