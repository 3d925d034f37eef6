"""How many processor cores this process may use. It imports no torch. Way in: `cores`."""

from __future__ import annotations

import os


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
