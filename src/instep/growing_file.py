"""New bytes of a file that grows, as often as one looks; each once.

A file that was cut, replaced or written anew is noticed: then all has to be read again. Links are
not followed. Ways in: `Tail`, `last_bytes`.
"""

from __future__ import annotations

import os
from pathlib import Path

from instep.plain_file import plain

MOST_BYTES = 1 << 22
"""Read at once."""

_LOOK_BACK = 64


class Rewritten(Exception):
    """A file is no longer what was read of it before."""


class Tail:
    """Reads a file from a place on.

    Args:
        path: of the file, which may come later.
        start: the first byte that is of interest.
        size: of a record; parts of one are left for the next time. 0 for lines of text.
    """

    def __init__(self, path: Path, size: int = 0, start: int = 0) -> None:
        self._path, self._size, self.at = path, size, start
        self._start, self._file, self._before = start, (0, 0), b""

    def new(self, most: int = MOST_BYTES) -> bytes:
        """Whole records, or whole lines, that have come since the last call.

        Raises:
            Rewritten: what came before has changed.
            OSError: the file cannot be read.
        """
        try:
            descriptor = plain(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            if self.at > self._start:
                raise Rewritten from None
            return b""
        try:
            self._check(os.fstat(descriptor), descriptor)
            data = os.pread(descriptor, most, self.at)
        finally:
            os.close(descriptor)
        end = len(data) // self._size * self._size if self._size else data.rfind(b"\n") + 1
        data = data[:end]
        self.at += len(data)
        self._before = (self._before + data)[-_LOOK_BACK:]
        return data

    def new_before(self, end: int) -> bytes:
        """Read as `new` does, but nothing from the byte `end` on."""
        return self.new(min(MOST_BYTES, end - self.at))

    def rewind(self) -> None:
        """Begin again, with the file that is there now."""
        self.at, self._file, self._before = self._start, (0, 0), b""

    def _check(self, about: os.stat_result, descriptor: int) -> None:
        known, self._file = self._file, (about.st_dev, about.st_ino)
        if self.at == self._start:
            return
        before = os.pread(descriptor, len(self._before), self.at - len(self._before))
        if known != self._file or about.st_size < self.at or before != self._before:
            raise Rewritten


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none, or a link."""
    return path.lstat().st_size if path.is_file() and not path.is_symlink() else 0


def last_bytes(path: Path, most: int) -> bytes:
    """The end of a file, or nothing where there is none; a link is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        descriptor = plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    try:
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, most, max(0, size - most))
    finally:
        os.close(descriptor)
