"""Printing without waiting for whoever reads: a paused pager, a terminal after Ctrl-S.

The master must not stand still because nobody takes what it prints, so a thread does the
writing. What is printed is not known here. Way in: `Output`.
"""

from __future__ import annotations

import io
import threading
import time
from typing import TextIO

MOST_CHARACTERS = 1 << 20
"""What is kept for a reader that pauses; what comes after that is lost."""


class Output(io.TextIOBase):
    """A text stream that takes everything at once, and hands it on as fast as it is read.

    Args:
        stream: that may block.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._waiting = 0  # characters, those that are being written among them
        self._changed = threading.Condition()
        threading.Thread(target=self._hand_on, name="instep output", daemon=True).start()

    def write(self, text: str) -> int:
        """Take a text; returns its length."""
        with self._changed:
            if self._waiting < MOST_CHARACTERS:
                self._texts.append(text)
                self._waiting += len(text)
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all has been read, but no longer than that; whether it has."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._waiting

    def _hand_on(self) -> None:
        while True:
            with self._changed:
                while not self._texts:
                    self._changed.wait()
                text = "".join(self._texts)
                self._texts.clear()
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads it any more
            with self._changed:
                self._waiting -= len(text)
                self._changed.notify_all()

    def writable(self) -> bool:
        """It is."""
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
