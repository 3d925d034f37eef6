"""What a worker has sent and no master has acknowledged, in memory that outlives the worker.

A message that a master has not handled yet is lost with that master, and the worker sends it again
to the next one. Where both are killed, the process that takes the worker's place finds it here.
What a message is, is not known here. In the memory file: where the messages begin and end (among
the stamps, `memory_files.py`), and behind the first page each with its length and checksum.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque

from instep.system.memory_files import OUTBOX

_BEGIN = 4096
"""Where in the file the messages are."""

ROOM = 1 << 20
"""Bytes for them; what does not fit is not kept."""

_ENDS, _MESSAGE = struct.Struct("<QQI"), struct.Struct("<II")


class Outbox:
    """Messages, the oldest first; of one thread at a time.

    Args:
        file: a memory file of this process.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._sizes: deque[int] = deque()  # in the file; 0 for one that is not there
        self._begin = self._end = 0
        begin, end, checksum = _ENDS.unpack(os.pread(file, _ENDS.size, OUTBOX).ljust(_ENDS.size))
        left = list[bytes]()
        if checksum == _checksum(begin, end) and begin < end <= ROOM:
            self._begin = self._end = begin
            held = os.pread(file, end - begin, _BEGIN + begin)
            while len(message := _first(held)):
                left.append(message)
                self._sizes.append(_MESSAGE.size + len(message))
                held = held[self._sizes[-1] :]
            self._end += sum(self._sizes)
        self.left = left
        """What the process before has left; they are kept until `drop` was called for each."""

    def put(self, message: bytes) -> None:
        """Keep one more, as far as there is room."""
        head = _MESSAGE.pack(len(message), zlib.crc32(message))
        size = len(head) + len(message)
        try:
            if self._end + size > ROOM:
                self._move_to_front()
            if self._end + size > ROOM:
                self._sizes.append(0)
                return
            os.pwrite(self._file, head + message, _BEGIN + self._end)
            self._set(self._begin, self._end + size)
            self._sizes.append(size)
        except OSError:  # no memory: it is kept in this process alone
            self._sizes.append(0)

    def drop(self) -> None:
        """The oldest has been acknowledged."""
        size = self._sizes.popleft()
        begin = self._begin + size
        if size:
            self._set(*((begin, self._end) if begin < self._end else (0, 0)))

    def _move_to_front(self) -> None:
        """Where those that are left do not lie in the way."""
        held = self._end - self._begin
        if held < self._begin:
            os.pwrite(self._file, os.pread(self._file, held, _BEGIN + self._begin), _BEGIN)
            self._set(0, held)

    def _set(self, begin: int, end: int) -> None:
        os.pwrite(self._file, _ENDS.pack(begin, end, _checksum(begin, end)), OUTBOX)
        self._begin, self._end = begin, end


def _first(held: bytes) -> bytes:
    """The first message; empty if there is none, or it is damaged."""
    if len(held) < _MESSAGE.size:
        return b""
    length, checksum = _MESSAGE.unpack_from(held)
    message = held[_MESSAGE.size : _MESSAGE.size + length]
    return message if len(message) == length and zlib.crc32(message) == checksum else b""


def _checksum(begin: int, end: int) -> int:
    return zlib.crc32(struct.pack("<QQ", begin, end)) if end else 0
