"""Marks of files in the cache, by which it is seen that somebody has written to one.

Ways in: `touch`, `is_untouched`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK_NS = 10**18
"""Time of change of each file in the cache, from its download on: one that somebody has written to
since has another one. Times of access say what is in use."""


def touch(path: Path) -> None:
    """Mark a file as it is now.

    Raises:
        FileNotFoundError: somebody has removed it; names it, as `os.utime` does not.
    """
    with open(path, "rb") as file:
        os.utime(file.fileno(), ns=(time.time_ns(), MARK_NS))


def is_untouched(path: Path) -> bool:
    """Whether a file is there, and nobody has written to it since it was marked."""
    try:
        return path.stat().st_mtime_ns == MARK_NS
    except OSError:
        return False
