"""What others can learn of one thread: for how long processors were busy with it, where it stands.

Who only waits uses no processor, however long it takes; who loops does. What
follows from that is not known here. Way in: `cpu_clock`, `can_be_asked`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

ASK_READER = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""A signal that asks the thread which reads data where it stands (`run/stacks.py`)."""


def can_be_asked() -> None:
    """Have the thread that calls this be the one that the signal reaches: others block it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [ASK_READER])


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
