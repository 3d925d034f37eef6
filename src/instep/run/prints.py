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
        """Write some of it; all counts as written where none can be."""
        with suppress(OSError):
            return os.write(self._descriptor, data)
        return memoryview(data).nbytes


def spare_prints() -> None:
    """Have standard output and error of this process drop what cannot be written."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        with suppress(OSError, ValueError):
            before.flush()
        buffer = io.BufferedWriter(Dropping(descriptor))
        text = io.TextIOWrapper(
            buffer,
            encoding=before.encoding,
            errors="backslashreplace",
            line_buffering=before.line_buffering,
        )
        setattr(sys, name, text)
