"""Temporary folders that do not stay where a process was killed.

A folder is locked while its process lives. What a killed process has left is removed by the next
that wants a folder of this kind in the same place. Way in: `temporary_folder`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    for path in place.glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(path, _FOLDER)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid() and _lock(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        return False
    return True
