"""How many cores other processes keep busy. Way in: `Neighbours`."""

from __future__ import annotations

import os
import time

import psutil


class Neighbours:
    """Looks from when it is made on; what this process and children of it use does not count."""

    def __init__(self) -> None:
        self._since, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    @property
    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self._since

    def cores(self) -> float:
        """Mean number of cores since then; children count as others until they have ended."""
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        return max(0.0, others) / max(self.seconds, 1e-3)


def _busy_s() -> float:
    """Processor seconds of this machine that were not idle, but for what packets took."""
    times = psutil.cpu_times()
    beside = "idle", "iowait", "irq", "softirq", "guest", "guest_nice"
    return float(sum(times) - sum(getattr(times, name, 0.0) for name in beside))


def _own_s() -> float:
    """Processor seconds of this process and of children that have ended."""
    return float(sum(os.times()[:4]))
