"""Whether the disk has room for a file, and what is left free beside it. It imports no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from instep.units import readable_bytes

RESERVE_BYTES = 1_000_000
"""What a file of ours leaves free on the disk, for records of steps and for logs."""

LAST_RESERVE_BYTES = 16_000
"""The same for what is saved after the last step: the run has to write that it has ended."""


def check_room(folder: Path, size_bytes: int, reserve: int = RESERVE_BYTES) -> None:
    """Refuse to fill the disk: the ledger is on it too, and nothing is committed without it.

    Raises:
        OSError: ENOSPC, as if it had been tried.
    """
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size_bytes + reserve:  # some file systems report nothing
        raise OSError(
            errno.ENOSPC,
            f"{readable_bytes(size_bytes + reserve)} are needed, {readable_bytes(free)} are free",
        )
