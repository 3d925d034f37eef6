"""Programs of instep that are forks of a process which has imported them, instead of fresh ones.

Importing takes seconds, a fork takes milliseconds. What is forked is as a program that was started:
a session of its own, standard input from a pipe, no other file of its parent's, default signals.
Which process has imported what they need is not decided here (`cli/preloaded.py` does). Ways in:
`ForkedProgram`, `is_warm`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

from instep.system.forks import native_threads
from instep.system.processes import name_process, wait_for_child

_HANDLED = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)

_warm = False


def keep_warm() -> None:
    """Declare that this process, and those forked from it, have imported what a run needs."""
    global _warm
    _warm = True


def is_warm() -> bool:
    """Whether programs of a run may be forks of this process: it has imported them, and has no
    thread that a fork would lose."""
    return _warm and threading.active_count() == 1 and native_threads() == 1


class ForkedProgram:
    """A program that is a fork of this process; what `Popen` says of one.

    Args:
        main: the program; what it returns is its exit code, None is 0.
        name: at most 15 bytes, for `ps`.
        output: descriptor of its standard output.
        errors: that of its standard error.
        keep: other descriptors that it inherits.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(
        self,
        main: Callable[[], object],
        *,
        name: str,
        output: int,
        errors: int,
        keep: Collection[int] = (),
    ) -> None:
        reads, writes = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(reads)
            os.close(writes)
            raise
        if not self.pid:
            become(main, name=name, given=reads, output=output, errors=errors, keep=keep)
        os.close(reads)
        self.stdin = os.fdopen(writes, "wb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = wait_for_child(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within so many seconds.
        """
        if self.returncode is None:
            self.returncode = wait_for_child(self.pid, float("inf") if timeout is None else timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a program of instep", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.poll() is None:  # else the number may be another's
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def become(
    main: Callable[[], object],
    *,
    name: str,
    given: int,
    output: int,
    errors: int,
    keep: Collection[int] = (),
) -> NoReturn:
    """Be a program from here on, in a fork that was made for it.

    Args:
        main, name, output, errors, keep: as of `ForkedProgram`.
        given: descriptor of its standard input.
    """
    code = 1
    try:
        gc.freeze()  # nothing of the process before is ever closed or run down here
        with suppress(PermissionError):  # it leads one already
            os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for source, target in ((given, 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        _close_all_but(keep)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False, buffering=1)
            for number, mode in enumerate(("r", "w", "w"))
        )
        name_process(name)
        code = int(main() or 0)  # type: ignore[call-overload]
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _close_all_but(keep: Collection[int]) -> None:
    first = 3
    for number in sorted(keep):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, int(os.sysconf("SC_OPEN_MAX")))
