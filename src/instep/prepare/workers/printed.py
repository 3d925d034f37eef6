"""The log of a worker, to which a user's function may print without end: its begin and end stay.

The worker appends to the file, so it may be cut while the worker runs. Way in: `Printed`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from instep.plain_file import plain

MOST = 4 << 20
"""Bytes at which a log is cut."""

HEAD, TAIL = 64 << 10, 256 << 10
"""Bytes of its begin and of its end that stay."""


class Printed:
    """A log that is kept small.

    Args:
        log: that another process appends to.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._left_out, self._said = log, 0, 0

    def cut(self) -> None:
        """Cut it if it is large; what it cannot do is left to the next time."""
        with suppress(OSError):
            size = self._log.stat().st_size
            if size <= MOST:
                return
            with open(self._log, "rb", opener=plain) as file:
                file.seek(size - TAIL)
                tail = file.read()
            self._left_out += size - HEAD - len(tail) - self._said
            said = f"\n[{self._left_out:,} bytes that were printed here are left out]\n".encode()
            with open(self._log, "ab", opener=plain) as file:
                file.truncate(HEAD)
                file.write(said + tail)
            self._said = len(said)
