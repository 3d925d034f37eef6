"""What a worker has sent and no master has acknowledged, in memory that outlives the worker.

A message that a master has not handled yet is lost with that master, and the worker sends it again
to the next one. Where both are killed, the process that takes the worker's place finds it here, and
how many more there were than had room. What a message is, is not known here. In the memory file:
where the messages begin and end (among the stamps, `memory_files.py`), and behind the first page
each with its length and checksum.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque

from instep.system.memory_files import OUTBOX

_BEGIN = 4096
"""Where in the file the messages are."""

ROOM = 1 << 24
"""Bytes for them; what does not fit is counted, and not kept."""

_ENDS, _MESSAGE = struct.Struct("<QQQI"), struct.Struct("<II")


class Outbox:
    """Messages, the oldest first; of one thread at a time.

    Args:
        file: a memory file of this process.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._sizes: deque[int] = deque()  # in the file; 0 for one that is not there
        self._begin = self._end = self._lacking = 0
        head = os.pread(file, _ENDS.size, OUTBOX).ljust(_ENDS.size, b"\0")
        begin, end, lacking, checksum = _ENDS.unpack(head)
        left = list[bytes]()
        valid = checksum == _checksum(begin, end, lacking)
        if valid and begin < end <= ROOM:
            self._begin = self._end = begin
            held = os.pread(file, end - begin, _BEGIN + begin)
            while message := _message_at(held, self._end - begin):
                left.append(message)
                self._sizes.append(_MESSAGE.size + len(message))
                self._end += self._sizes[-1]
        self.left = left
        """What the process before has left; they are kept until `drop` was called for each."""
        self.lost = lacking if valid else 0
        """How many more it had sent, for which there was no room. Nobody has them any more."""
        if self.lost:
            self._set(self._begin, self._end)

    def put(self, message: bytes) -> None:
        """Keep one more, as far as there is room."""
        head = _MESSAGE.pack(len(message), zlib.crc32(message))
        size = len(head) + len(message)
        try:
            if self._end + size > ROOM:
                self._move_to_front()
            if self._end + size > ROOM:
                self._sizes.append(0)
                self._lacking += 1
                self._set(self._begin, self._end)
                return
            os.pwrite(self._file, head + message, _BEGIN + self._end)
            self._set(self._begin, self._end + size)
            self._sizes.append(size)
        except OSError:  # no memory: it is kept in this process alone
            self._sizes.append(0)
            self._lacking += 1

    def drop(self) -> None:
        """The oldest has been acknowledged."""
        size = self._sizes.popleft()
        begin = self._begin + size
        self._lacking -= not size and self._lacking > 0
        self._set(*((begin, self._end) if begin < self._end else (0, 0)))

    def _move_to_front(self) -> None:
        """Where those that are left do not lie in the way."""
        held = self._end - self._begin
        if held < self._begin:
            os.pwrite(self._file, os.pread(self._file, held, _BEGIN + self._begin), _BEGIN)
            self._set(0, held)

    def _set(self, begin: int, end: int) -> None:
        checksum = _checksum(begin, end, self._lacking)
        os.pwrite(self._file, _ENDS.pack(begin, end, self._lacking, checksum), OUTBOX)
        self._begin, self._end = begin, end


def _message_at(held: bytes, at: int) -> bytes:
    """The message that begins there; empty if there is none, or it is damaged."""
    if len(held) < at + _MESSAGE.size:
        return b""
    length, checksum = _MESSAGE.unpack_from(held, at)
    message = held[at + _MESSAGE.size : at + _MESSAGE.size + length]
    return message if len(message) == length and zlib.crc32(message) == checksum else b""


def _checksum(begin: int, end: int, lacking: int) -> int:
    return zlib.crc32(struct.pack("<QQQ", begin, end, lacking)) if end or lacking else 0
