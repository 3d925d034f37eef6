"""What a worker prints goes to its log, and a log that cannot be written ends nothing.

Python raises where a line cannot be printed, in the middle of the user's own
code. In a worker, whose output is a file that nobody may ever read, the line
is dropped instead.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


class Dropping(io.RawIOBase):
    """Writes to a descriptor what can be written there, and says that all was."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor, which stays its owner's."""
        return self._descriptor

    def write(self, data: Any, /) -> int:
        """Write what can be written; all of it counts as written."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return size


def spare_prints() -> None:
    """Have standard output and error of this process drop what cannot be written."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        with suppress(OSError, ValueError):
            before.flush()
        raw: Any = Dropping(descriptor)
        text = io.TextIOWrapper(
            raw if before.write_through else io.BufferedWriter(raw),  # the former with python -u
            encoding=before.encoding,
            errors="backslashreplace",
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        setattr(sys, name, text)
