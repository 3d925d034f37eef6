"""Small facts about processes that the standard library does not offer."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux).

    Elsewhere a process notices by its socket that the master has gone.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def exit_code_of(status: int) -> int:
    """From `os.waitpid`: the exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(status)
