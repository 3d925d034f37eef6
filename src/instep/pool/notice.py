"""A sentence that a scheduler has for whoever looks at its pool, such as that it waits for a disk.

It is in a file that has its size from the beginning, and is overwritten in its place: that needs no
room. Nobody relies on it. Ways in: `SchedulerNotice`, `notice_in`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from instep.plain_file import PRIVATE, plain, read_plain

FILE = "scheduler.notice"
SIZE = 2048


class SchedulerNotice:
    """The notice of one scheduler, empty at first.

    Args:
        folder: of the pool.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._said = -1, ""
        with suppress(OSError):
            self._file = plain(folder / FILE, os.O_WRONLY | os.O_CREAT, PRIVATE)
            self._write("")

    def say(self, text: str) -> bool:
        """Put a sentence there; returns whether it is another one than before."""
        new, self._said = text != self._said, text
        if new and self._file >= 0:
            with suppress(OSError):
                self._write(text)
        return new

    def close(self) -> None:
        """Leave no sentence behind."""
        self.say("")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")[: SIZE - 1]
        os.pwrite(self._file, data.ljust(SIZE - 1) + b"\n", 0)


def notice_in(folder: Path) -> str:
    """Read what the scheduler of a pool says; empty if it says nothing."""
    with suppress(OSError):
        return read_plain(folder / FILE).decode(errors="replace").strip()
    return ""
