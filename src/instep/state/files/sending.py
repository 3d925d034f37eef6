"""A part of a checkpoint on its way to the machine of the run's folder, which another rank writes.

It travels in chunks, so that neither end holds more than one chunk of it twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.errors import CheckpointError
from instep.state.files.manifest import FileEntry
from instep.state.files.room import RESERVE_BYTES
from instep.state.files.staging import contents, write_contents

CHUNK_BYTES = 1 << 24


def send_file(
    comm: Comm,
    to: int,
    content: tuple[Mapping[str, Tensor], Mapping[str, str]] | None,
    *,
    device: torch.device,
) -> None:
    """Send rank `to`, which calls `receive_file`, what `write_tensors` would write; None where
    there is nothing.

    Raises:
        CheckpointError: a tensor cannot be kept; the other rank knows that nothing comes.
        PeerError: the other rank was lost.
    """
    try:
        size, parts = (-1, iter(())) if content is None else contents(*content)
    except CheckpointError:
        comm.send(torch.tensor([-1], device=device), to).wait()
        raise
    comm.send(torch.tensor([size], device=device), to).wait()
    for chunk in _chunks(parts):
        comm.send(chunk.to(device), to).wait()


def receive_file(
    comm: Comm, source: int, path: Path, *, device: torch.device, reserve: int = RESERVE_BYTES
) -> FileEntry | None:
    """Write what rank `source` sends; None if it sends nothing.

    Raises:
        CheckpointError: the file cannot be written; then there is none, and all was received.
        PeerError: the other rank was lost.
    """
    announced = torch.zeros(1, dtype=torch.int64, device=device)
    comm.receive(announced, source).wait()
    size = int(announced)
    if size < 0:
        return None
    arriving = _arriving(comm, source, size, device)
    try:
        return write_contents(path, size, arriving, reserve)
    finally:
        for _ in arriving:
            pass


def _chunks(parts: Iterator[bytes | memoryview[Any]]) -> Iterator[Tensor]:
    """The same bytes, in chunks of one size and a last one that may be shorter."""
    chunk, filled = torch.empty(CHUNK_BYTES, dtype=torch.uint8), 0
    for part in parts:
        rest = _as_tensor(part)
        while len(rest):
            taken = min(len(rest), CHUNK_BYTES - filled)
            chunk[filled : filled + taken] = rest[:taken]
            rest, filled = rest[taken:], filled + taken
            if filled == CHUNK_BYTES:
                yield chunk
                filled = 0
    if filled:
        yield chunk[:filled]


def _as_tensor(part: bytes | memoryview[Any]) -> Tensor:
    if not len(part):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(part) if isinstance(part, bytes) else part, dtype=torch.uint8)


def _arriving(comm: Comm, source: int, size: int, device: torch.device) -> Iterator[bytes]:
    while size > 0:
        chunk = torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8, device=device)
        comm.receive(chunk, source).wait()
        size -= len(chunk)
        yield bytes(chunk.cpu().numpy())
