"""What others can learn of one thread: its CPU time, and its current stack.

A thread that waits uses no CPU time, however long it waits; one that loops does. What to
conclude is not known here. Way in: `cpu_clock`, `answer_stack_signals`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
