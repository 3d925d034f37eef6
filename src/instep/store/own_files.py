"""Files that one process writes: opened for their owner alone, locked, and still where they were.

Nothing here knows what is in them. Ways in: `open_own`, `lock` and `unlock`, `gone`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from instep.errors import RunError
from instep.plain_file import PRIVATE, plain

NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
"""What a file system answers that has no locks."""


def open_own(path: Path, mode: str = "ab", *, buffering: int = -1) -> IO[Any]:
    """Open a file that only its owner may open: a process that may read it could lock it.

    Raises:
        OSError: it cannot be opened for writing.
    """
    file = open(path, mode, buffering=buffering, opener=_owners)  # noqa: SIM115 closed by the caller
    with suppress(OSError):  # another user owns it, or the file system has no modes
        if os.fstat(file.fileno()).st_mode & 0o077:
            os.fchmod(file.fileno(), PRIVATE)
    return file


def _owners(path: str, flags: int) -> int:
    return plain(path, flags, PRIVATE)


def lock(file: IO[Any]) -> bool:
    """Lock a file that is open for writing; never waits.

    Returns:
        False if another process has locked it. True also if the file system has no locks.

    Raises:
        RunError: it cannot be locked for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise RunError(f"{file.name} cannot be locked: {error.strerror}.") from None
    return True


def unlock(file: IO[Any]) -> None:
    """Unlock a file, even if forks of this process keep it open; a second call does nothing."""
    if not file.closed:
        with suppress(OSError):  # the file system has no locks; closing unlocks as well
            fcntl.flock(file, fcntl.LOCK_UN)


def gone(run: Path) -> str:
    """A sentence if the run folder is no longer at this path; else empty."""
    try:
        run.stat()
    except FileNotFoundError:
        return (
            f"the run folder {run} was removed or renamed during the run. If it was renamed, "
            "it can be resumed under its new name."
        )
    except OSError:  # it cannot be known
        pass
    return ""
