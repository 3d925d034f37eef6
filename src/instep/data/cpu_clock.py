"""How long processors have been busy with one thread, to be asked by another.

Who only waits uses no processor, however long it takes; who loops does. What
follows from that is not known here. Way in: `cpu_clock`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


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
