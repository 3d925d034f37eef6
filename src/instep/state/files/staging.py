"""A safetensors file to be: its header, and memory laid out as its data.

State is copied into this memory while training is held, and written to the disk later, in
the background. Nothing here knows checkpoints. Way in: `StagedFile`; `save_model` for the
model that a run ends with; `sync` and `sync_path`, after which data survives a crash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.files.manifest import FileEntry, reason
from instep.state.files.model_file import HASH_BLANK, HASH_KEY
from instep.state.files.room import RESERVE_BYTES, check_room
from instep.state.snapshot import (
    DTYPES,
    RESERVED,
    check_tensor,
    model_tensors,
    raw_bytes,
    tied_names,
)

SAVING = ".saving-"
"""Begins the name of what is being written."""

_CHUNK_BYTES = 1 << 24


def save_model(
    path: Path, model: nn.Module, metadata: Mapping[str, str], reserve: int = RESERVE_BYTES
) -> int:
    """Write parameters and persistent buffers as one safetensors file, as `save_tensors`.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: the model cannot be kept, or the file not be written.
    """
    return save_tensors(path, model_tensors(model), metadata, reserve)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    reserve: int = RESERVE_BYTES,
) -> int:
    """Write one safetensors file, atomically.

    Tied weights are kept once; the metadata maps each other name to the one that
    is kept, as `safetensors.torch.load_model` expects it. The metadata has the
    file's own hash as well, which `model_file.py` checks.

    Args:
        metadata: plain strings for the file's header; `format` is set to `pt`.
        reserve: bytes that are left free on the disk.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: a tensor cannot be kept, or the file not be written.
    """
    staged = StagedFile(tensors, {"format": "pt", **metadata, HASH_KEY: HASH_BLANK})
    staged.copy(tensors)
    temporary = path.with_name(f"{SAVING}{path.name}")
    try:
        check_room(path.parent, staged.size_bytes, reserve)
        with temporary.open("wb") as file:
            entry = staged.write(file)
            file.seek(staged.header.index(f'"{HASH_KEY}":"'.encode()) + len(HASH_KEY) + 4)
            file.write(entry.sha256.encode("ascii"))
            sync(file)
        temporary.rename(path)
        sync_path(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} was not saved: {reason(error)}.") from error
    return entry.size_bytes


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] = MappingProxyType({}),
    reserve: int = RESERVE_BYTES,
) -> FileEntry:
    """Write a safetensors file, whose name says that it is not complete, and sync it.

    Tensors are written from their own memory, and must not change meanwhile.

    Raises:
        CheckpointError: a tensor cannot be kept, or the file not be written; then there is none.
    """
    size, parts = contents(tensors, metadata)
    return write_contents(path, size, parts, reserve)


def contents(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[int, Iterator[bytes | memoryview[Any]]]:
    """Size and bytes of a safetensors file, tensor by tensor from their own memory.

    Raises:
        CheckpointError: a tensor cannot be kept.
    """
    kept, spans, header = _plan(tensors, dict(metadata))
    data = (raw_bytes(kept[name]).numpy().data for name in spans)
    return len(header) + _end(spans), chain([header], data)


def write_contents(
    path: Path,
    size: int,
    parts: Iterable[bytes | memoryview[Any]],
    reserve: int = RESERVE_BYTES,
) -> FileEntry:
    """Write a file of this size, and sync it; `reserve` bytes are left free on the disk.

    Raises:
        CheckpointError: it cannot be written; then there is none.
    """
    try:
        check_room(path.parent, size, reserve)
        with path.open("wb") as file:
            return _write(file, size, parts)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CheckpointError(f"{path} was not saved: {reason(error)}.") from error


def _write(file: IO[bytes], size: int, parts: Iterable[bytes | memoryview[Any]]) -> FileEntry:
    digest = hashlib.sha256()
    for part in parts:  # both calls let other threads run meanwhile
        digest.update(part)
        file.write(part)
    sync(file)
    return FileEntry(size, digest.hexdigest())


class StagedFile:
    """One file to be: its safetensors header, and memory laid out as its data.

    The format: header length (8 bytes, little-endian), header (JSON, padded
    with spaces to 8 bytes), then the tensors without gaps. Wider types come
    first, so that every tensor starts at a multiple of its item size.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        kept, spans, self.header = _plan(tensors, metadata)
        self._layout = _layout_of(tensors)
        self._devices = {tensor.device for tensor in kept.values() if tensor.is_cuda}
        # pinned memory lets a GPU copy by itself, at the full rate of the bus
        self._data = torch.empty(_end(spans), dtype=torch.uint8, pin_memory=bool(self._devices))
        self._places = {
            name: self._data[start:stop].view(kept[name].dtype).view(kept[name].shape)
            for name, (start, stop) in spans.items()
        }

    @property
    def size_bytes(self) -> int:
        """How large the file will be."""
        return len(self.header) + len(self._data)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether names, types, shapes and ties are still those that it was laid out for."""
        try:
            return self._layout == _layout_of(tensors)
        except (RuntimeError, NotImplementedError):  # no longer a dense tensor
            return False

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values; when it returns, `tensors` may change."""
        if self._places and not self._devices:
            values = [tensors[name] for name in self._places]
            torch._foreach_copy_(list(self._places.values()), values)
            return
        for name, place in self._places.items():
            place.copy_(tensors[name], non_blocking=True)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self, file: IO[bytes]) -> FileEntry:
        """Write header and data, and sync them to the disk; returns size and hash."""
        data: memoryview[Any] = self._data.numpy().data
        pieces: list[bytes | memoryview[Any]] = [self.header]
        pieces += [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        return _write(file, self.size_bytes, pieces)


def _layout_of(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    kinds = {name: (t.dtype, t.shape, t.device, t.layout) for name, t in tensors.items()}
    return kinds, tied_names(tensors)


def _plan(
    tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]], bytes]:
    """Of a file to be: what it keeps, where that lies in its data, and what it begins with."""
    for name, tensor in tensors.items():
        check_tensor(tensor, f"the tensor {name!r}")
        if name == RESERVED:
            raise CheckpointError(f"a tensor is called {RESERVED!r}: safetensors forbids it.")
    tied = tied_names(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    spans = spans_of(kept)
    return kept, spans, file_header(kept, spans, metadata | tied)


def _end(spans: Mapping[str, tuple[int, int]]) -> int:
    return max((stop for _, stop in spans.values()), default=0)


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of a file's data: wider types first, then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def spans_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Name to [start, stop) in bytes of the data, in the order of the data."""
    spans: dict[str, tuple[int, int]] = {}
    stop = 0
    for name in in_file_order(tensors):
        start, stop = stop, stop + tensors[name].nbytes
        spans[name] = (start, stop)
    return spans


def file_header(
    tensors: Mapping[str, Tensor], spans: Mapping[str, tuple[int, int]], metadata: dict[str, str]
) -> bytes:
    """What a file begins with, up to its data."""
    header: dict[str, Any] = {RESERVED: metadata} if metadata else {}
    for name, span in spans.items():
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": span,
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sync(file: IO[bytes]) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file or a folder to the disk, whichever process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
