"""A safetensors file: is it one, and is it the one that was written?

The model that a run leaves has its own SHA-256 in its header, so the hash travels with every
copy: it is the hash of the whole file with the digits of the hash as zeros. A checkpoint's
file has its hash in the manifest beside it. A safetensors file from elsewhere has neither;
only its structure is checked then. Nothing is ever unpickled, and nothing here imports torch.

Files are read piece by piece and never mapped: limits on a process's memory count a mapping of the
whole file, however little of it is wanted.
Way in: `check_hash` for every byte, `open_tensors` to read, which checks the structure.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from instep.errors import CheckpointError
from instep.state.files.manifest import (
    FORMAT,
    MANIFEST,
    FileEntry,
    check_file,
    is_checkpoint,
    open_regular,
    read_manifest,
    reason,
)
from instep.undecodable import UNDECODABLE

HASH_KEY = "file_sha256"
"""The entry of the header's metadata."""

HASH_BLANK = "0" * 64
"""Its value while the hash is computed."""

_PICKLES = (b"PK\x03\x04", b"\x80\x02")  # how files of torch.save begin, new and old
_OF_A_RUN = "run.id"  # beside the model of a run, which always has its hash
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHUNK_BYTES = 1 << 20
_MOST_HEADER_BYTES = 100_000_000  # as safetensors' own reader

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Of each type that a safetensors file may have."""


class TensorEntry(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """As safetensors calls it, such as `F32`."""
    shape: tuple[int, ...]
    start: int
    """Of its first byte, from the beginning of the file."""
    size: int
    """In bytes."""


class TensorFile:
    """A safetensors file, open; to be used as a context.

    Args:
        path: the file.
        name: for messages.

    Raises:
        CheckpointError: it cannot be opened.
        ValueError: it is no safetensors file; says why.
    """

    entries: dict[str, TensorEntry]
    """In the order of the header."""
    metadata: dict[str, str]
    """What else the header says."""

    def __init__(self, path: Path, name: Path) -> None:
        self._name = name
        self._file: BufferedReader = open_regular(path)
        try:
            self.entries, self.metadata = _header(self._file)
        except OSError as error:
            self._file.close()
            raise CheckpointError(f"{name} cannot be read: {reason(error)}.") from error
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, tensor: str, out: memoryview, first: int = 0) -> None:
        """Fill `out` with the bytes of a tensor, from its byte `first` on.

        Raises:
            CheckpointError: they cannot be read.
        """
        try:
            self._file.seek(self.entries[tensor].start + first)
            while out:
                if not (count := self._file.readinto(out)):
                    raise CheckpointError(f"{self._name}: {tensor} is cut off.")
                out = out[count:]
        except OSError as error:
            raise CheckpointError(
                f"{self._name}: {tensor} cannot be read: {reason(error)}."
            ) from error


def open_tensors(path: Path, source: Path | None = None) -> TensorFile:
    """Open a safetensors file; its header is checked against its size.

    Args:
        path: the file.
        source: the name for messages, where the file is a copy.

    Raises:
        CheckpointError: it is missing, unreadable, of another kind, truncated or damaged.
    """
    name = source or path
    try:
        return TensorFile(path, name)
    except ValueError as error:
        with open_regular(path) as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(4)
        if start.startswith(_PICKLES):  # so may a safetensors file, if its header has 640 bytes
            raise CheckpointError(
                f"{name} is a file of torch.save, which may hold code, and no safetensors file. "
                "If you trust it, convert it with safetensors.torch.save_file(state_dict, path)."
            ) from error
        raise CheckpointError(
            f"{name} is no safetensors file, or it is truncated or damaged ({size} bytes): {error}."
        ) from error


class _TensorHeader(msgspec.Struct):
    """A tensor, as the header has it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _header(file: BufferedReader) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    size, start = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"its header would have {length} bytes")
    try:
        table = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(table.pop("__metadata__", b"{}"), type=dict[str, str])
        rows = {name: msgspec.json.decode(row, type=_TensorHeader) for name, row in table.items()}
    except UNDECODABLE as error:
        raise ValueError(f"its header: {error}") from error
    for name, row in rows.items():
        first, stop = row.data_offsets
        bits = _BITS.get(row.dtype)
        if bits is None:
            raise ValueError(f"{name} is of the unknown type {row.dtype!r}")
        if min([0, *row.shape]) < 0 or 8 * (stop - first) != bits * math.prod(row.shape):
            raise ValueError(f"{name}, {row.dtype} {row.shape}, cannot have {stop - first} bytes")
    spans = sorted(row.data_offsets for row in rows.values())
    for before, after in pairwise([(0, 0), *spans, (size - 8 - length, 0)]):
        if before[1] != after[0]:
            raise ValueError(f"its data end at {before[1]} and continue at {after[0]}")
    return {
        name: TensorEntry(
            row.dtype,
            tuple(row.shape),
            8 + length + row.data_offsets[0],
            row.data_offsets[1] - row.data_offsets[0],
        )
        for name, row in rows.items()
    }, metadata


def check_hash(path: Path, *, required: bool = False, source: Path | None = None) -> bool:
    """Compare a safetensors file with the hash that was recorded for it.

    Args:
        path: the file.
        required: whether it must have its hash; the model of a run folder must in any case.
        source: the name for messages, where the file is a copy.

    Returns:
        False where no hash was recorded: then only the structure was checked.

    Raises:
        CheckpointError: it is no valid safetensors file, or not the one that was written.
    """
    if path.name in (files := _listed(path.parent)):
        check_file(path, files[path.name])
        return True
    with open_tensors(path, source) as tensors:
        recorded = tensors.metadata.get(HASH_KEY, "")
    name = source or path
    if not _SHA256.fullmatch(recorded):
        if recorded or required or (path.parent / _OF_A_RUN).is_file():
            raise CheckpointError(
                f"{name} is damaged: its header does not have its SHA-256, as that of every model "
                "that a run leaves does."
            )
        return False
    found = _own_hash(path, recorded, name)
    if found != recorded:
        raise CheckpointError(
            f"{name} is damaged: its SHA-256 is {found[:12]}... and should be {recorded[:12]}..., "
            "as its header says. If another program has changed it on purpose, have that leave "
            f"{HASH_KEY!r} out of its metadata."
        )
    return True


def _listed(folder: Path) -> dict[str, FileEntry]:
    """What the manifest of a checkpoint lists; empty where the folder is none."""
    page = folder / MANIFEST
    try:
        ours = is_checkpoint(folder) or FORMAT.encode() in page.read_bytes()
    except OSError:
        return {}
    return read_manifest(folder).files if ours and page.exists() else {}


def _own_hash(path: Path, recorded: str, name: Path) -> str:
    """SHA-256 of a file in whose header the recorded hash is blank."""
    with open_regular(path) as file:
        try:
            start = file.read(8)
            head = file.read(int.from_bytes(start, "little"))
            blank = head.replace(recorded.encode(), HASH_BLANK.encode(), 1)
            digest = hashlib.sha256(start + blank)
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {reason(error)}.") from error
    return digest.hexdigest()
