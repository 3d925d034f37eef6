"""Which doors there are: memory that a worker writes, and its loader processes read.

Loader processes are forked before a group forms, and doors change with each generation. So the
list lies in memory that is shared through the fork. Way in: `Board`.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib

import msgspec

_SIZE = 1 << 24
"""Bytes of the longest list; memory that is not written takes no room."""

_HEAD = struct.Struct("<II")

_TRIES = 1000


class HeldShards(msgspec.Struct, frozen=True, array_like=True):
    """Which shards of a dataset lie on the disk of a worker's host."""

    dataset: str
    """The `sha256` of its manifest."""
    folder: str
    shards: bytes
    """A bit for each, the first one the lowest of the first byte."""

    def has(self, shard: int) -> bool:
        """Whether it is there."""
        byte = shard // 8
        return byte < len(self.shards) and bool(self.shards[byte] >> shard % 8 & 1)


class PeerDoor(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker gives samples to others, and which."""

    worker: int
    node: str
    """Name of its machine, for messages."""
    host: str
    port: int
    holdings: list[HeldShards]

    def has(self, dataset: str, shard: int) -> bool:
        """Whether it has a shard of a dataset."""
        return any(each.dataset == dataset and each.has(shard) for each in self.holdings)


class Board:
    """The doors of the other workers, as last written; make it before loader processes are."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self.write([])

    def write(self, doors: list[PeerDoor]) -> None:
        """Replace the list; one process does so."""
        body = msgspec.msgpack.encode(doors)
        assert len(body) <= _SIZE - _HEAD.size, "a list of doors that fits"
        self._memory[_HEAD.size : _HEAD.size + len(body)] = body
        self._memory[: _HEAD.size] = _HEAD.pack(len(body), zlib.crc32(body))

    def read(self) -> list[PeerDoor]:
        """The list; whole, also while it is being written."""
        for _ in range(_TRIES):
            length, crc = _HEAD.unpack(self._memory[: _HEAD.size])
            body = self._memory[_HEAD.size : _HEAD.size + length]
            if zlib.crc32(body) == crc:
                return msgspec.msgpack.decode(body, type=list[PeerDoor])
            time.sleep(0.001)
        return []  # its writer has died in the middle
