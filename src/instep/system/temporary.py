"""Temporary folders that do not stay where a process was killed.

A folder is locked while its process lives. What a killed process has left is removed by the next
that wants a folder of this kind in the same place. Way in: `temporary_folder`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UNLOCKED_S = 3600.0
"""A folder that is not locked yet is left alone for so long after it was made."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def temporary_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """A folder that is removed afterwards; or by the next of this prefix, if the process is killed.

    Args:
        prefix: its name begins so.
        within: where it is made; None for the system's temporary folder.
    """
    place = Path(tempfile.gettempdir()) if within is None else within
    _remove_left(place, prefix)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place)).resolve()
    descriptor = os.open(made, _FOLDER)
    folder = made
    try:
        _lock(descriptor)
        folder = made.rename(made.with_name(made.name[1:]))  # before the lock it is not to be found
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left(place: Path, prefix: str) -> None:
    hidden = [path for path in place.glob(f".{prefix}*") if _is_old(path)]
    for path in (*place.glob(f"{prefix}*"), *hidden):
        with suppress(OSError):
            descriptor = os.open(path, _FOLDER)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid() and _lock(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _is_old(path: Path) -> bool:
    """Whether a folder was made so long ago that its process must have locked it."""
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > _UNLOCKED_S
    return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        return False
    return True
