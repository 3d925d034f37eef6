"""Memory that a process has freed goes back to the system.

glibc keeps what was freed for the next request, and raises the size up to which it does so to
that of the largest block it has seen freed, at most 32 MB. Where whole layers come and go with
every pass, a process would hold twice what it uses.

The system clears what it gives, page by page. With pages of 2 MB that takes a fifth of the time,
so torch is told to ask for these, which it does for tensors of 2 MB or more. Smaller ones stay
with the process, since to clear them each time would take longer than to compute with them; what
is left of them after a start is given back by `return_unused_memory`.
"""

from __future__ import annotations

import ctypes
import os

RETURNED_BYTES = 2 << 20
"""Blocks from this size on go back one by one, smaller ones once so much is free in a row."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8  # of glibc's malloc.h
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it first makes a tensor


def return_freed_memory() -> bool:
    """For as long as this process lives, and for its forks; before torch has made a tensor.

    Returns:
        Whether this was done; not without glibc, and not if the user has set the thresholds.
    """
    if any(name in os.environ for name in _OWN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    os.environ.setdefault(_LARGE_PAGES, "1")
    done = {mallopt(each, RETURNED_BYTES) for each in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)}
    done.add(mallopt(_ARENAS, 1))  # threads leave holes of their own otherwise
    return done == {1}


def return_unused_memory() -> None:
    """Give back every page that is free now, also between others; none without glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
