"""What others can learn of one thread: for how long processors were busy with it, where it stands.

Who only waits uses no processor, however long it takes; who loops does. What
follows from that is not known here. Way in: `cpu_clock`, `asked_here`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASK_READER = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""A signal that asks the thread which reads data where it stands (`system/stacks.py`)."""


@contextmanager
def asked_here() -> Iterator[None]:
    """Have the thread that calls this be the one that the signal reaches, for the context.

    All others block it, also those that are to read and have nothing to do.
    """
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [ASK_READER])
    try:
        yield
    finally:
        if ASK_READER in before:
            signal.pthread_sigmask(signal.SIG_BLOCK, [ASK_READER])


def cpu_clock() -> Callable[[], float]:
    """CPU seconds of the thread that calls this, as a function that any thread may call.

    It gives 0.0 where the system does not tell, and once the thread has ended.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(threading.get_ident())  # of a thread that surely lives

    def used_s() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0

    return used_s
