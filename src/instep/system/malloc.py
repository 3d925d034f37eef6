"""Memory that a process has freed goes back to the system at once.

glibc keeps what was freed for the next request, and raises the size up to which it does so to
that of the largest block it has seen freed, at most 32 MB. Where whole layers come and go with
every pass, a process would hold twice what it uses.

The system clears what it gives, page by page. With pages of 2 MB that takes a fifth of the time,
so torch is told to ask for these.
"""

from __future__ import annotations

import ctypes
import os

RETURNED_BYTES = 1 << 20
"""Blocks from this size on go back one by one, smaller ones once so much is free in a row."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
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
    return done == {1}
