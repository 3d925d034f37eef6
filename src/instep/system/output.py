"""Output that neither blocks nor fails: of the master, and of workers.

`Output` takes what the master prints at once and writes it in a thread, so that a paused
pager or a terminal after Ctrl-S does not stop the run. `drop_unwritable_output` makes a
worker drop what it cannot write to its log: Python would raise in the middle of the user's
code, for a line that may never be read. What is printed is not known here.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress
from typing import Any, TextIO

MOST_CHARACTERS = 1 << 20
"""Bytes that are kept for a reader that pauses; what follows is lost."""


class Output(io.TextIOBase):
    """A text stream that takes everything at once, and writes it on as fast as it is read.

    Args:
        stream: that may block.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._waiting = 0  # characters, those that are being written among them
        self._changed = threading.Condition()
        threading.Thread(target=self._forward, name="instep output", daemon=True).start()

    def write(self, text: str) -> int:
        """Take a text; returns its length."""
        with self._changed:
            if self._waiting < MOST_CHARACTERS:
                self._texts.append(text)
                self._waiting += len(text)
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything has been read, at most `timeout_s`; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _forward(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                text = "".join(self._texts)
                self._texts.clear()
            with suppress(OSError, ValueError):  # the reader is gone
                self._stream.write(text)
                self._stream.flush()
            with self._changed:
                self._waiting -= len(text)
                self._changed.notify_all()

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return self._stream.encoding


def open_standard_streams() -> None:
    """Put the null device where a standard stream is closed, and print what a terminal can show.

    A supervisor or a shell (`<&-`) may close them: the next file or socket would get their number,
    and processes that are started would take it for their input or output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", errors="replace", closefd=False))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # it may take ASCII or Latin-1 only


class _Dropping(io.RawIOBase):
    """Writes to a descriptor what can be written there, and reports all of it as written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return size


def drop_unwritable_output() -> None:
    """Make standard output and error of this process drop what cannot be written."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        with suppress(OSError, ValueError):
            before.flush()
        raw: Any = _Dropping(descriptor)
        text = io.TextIOWrapper(
            raw if before.write_through else io.BufferedWriter(raw),  # the former with python -u
            encoding=before.encoding,
            errors="backslashreplace",
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        setattr(sys, name, text)
