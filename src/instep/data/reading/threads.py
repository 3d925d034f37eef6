"""What others can learn of one thread: its CPU time, and its current stack.

A thread that waits uses no CPU time, however long it waits; one that loops does. What to
conclude is not known here. Way in: `cpu_clock`, `answer_stack_signals`, `ask_stack`.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.errors import is_users

ASK_READER = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""A signal that asks the thread which reads data for its stack (`system/stacks.py`)."""


@contextmanager
def answer_stack_signals() -> Iterator[None]:
    """In this context the calling thread receives `ASK_READER`.

    All other threads block it, also reading threads that have nothing to do.
    """
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [ASK_READER])
    try:
        yield
    finally:
        if ASK_READER in before:
            signal.pthread_sigmask(signal.SIG_BLOCK, [ASK_READER])


def cpu_clock() -> Callable[[], float]:
    """CPU seconds of the thread that calls this, as a function that any thread may call.

    It gives 0.0 where the system has no such clock, and once the thread has ended.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def used_s() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0

    return used_s


FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
"""A line of a stack as `faulthandler` writes it."""

_OUTERMOST = (" in _run_module_as_main", " in <module>", " in _bootstrap")
_CUT_SHORT = "  ..."
"""Stands for the outermost frames, if there are more than a hundred."""

_ANSWER_S, _PAUSE_S = 1.0, 0.01


def is_whole(stack: str) -> bool:
    """Whether a stack has been written to its end: a thread's outermost frame is last."""
    last = stack.rstrip("\n").rpartition("\n")[2]
    return stack.endswith("\n") and (last.endswith(_OUTERMOST) or last == _CUT_SHORT)


def deepest_line(stack: str) -> str:
    """`file.py:12 in name`: the innermost line of the main thread that is the user's own.

    If no line of the user's is on the stack, that of a library or ours; empty without a
    stack.
    """
    frames = [match for line in stack.split("\n") if (match := FRAME.match(line))]
    own = [frame for frame in frames if is_users(Path(frame["file"]))]
    chosen = (own or frames)[:1]
    return next((f"{Path(f['file']).name}:{f['line']} in {f['name']}" for f in chosen), "")


def ask_stack(pid: int, file: int) -> str:
    """The stack of a process that writes it to this file at `ASK_READER`; empty without an answer.

    It answers also where it waits in a library's own code.
    """
    try:
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)  # the process has the same offset
        os.kill(pid, ASK_READER)
    except OSError:
        return ""
    stack, until = "", time.monotonic() + _ANSWER_S
    while not is_whole(stack) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
        stack = os.pread(file, 2**16, 0).decode(errors="replace")
    return stack
