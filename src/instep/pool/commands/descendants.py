"""Children of a process, and theirs: adopted when their parent ends, and ended together.

Ways in: `adopt_orphans`, `end_descendants`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from instep.system.processes import stat_fields

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> bool:
    """Take the end of each child that has ended; returns whether there are others."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def end_descendants(timeout_s: float) -> None:
    """Kill all children, and those that become children by that, until there is none (Linux).

    Args:
        timeout_s: after so long those are left that cannot be killed.
    """
    deadline = time.monotonic() + timeout_s
    while reap() and time.monotonic() < deadline:
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _children() -> Iterator[int]:
    me = str(os.getpid())
    for process in Path("/proc").glob("[0-9]*"):
        if stat_fields(int(process.name))[1:2] == [me]:
            yield int(process.name)
