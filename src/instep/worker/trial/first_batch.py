"""Values that the first pass sets from its batch, in Python, and later passes leave as they are.

A scale from the first loss, the mean of the first inputs. A worker's first batch is a micro-batch,
another one than one machine's, and a resumed run has another first batch.
"""

from __future__ import annotations

from collections.abc import Callable

from instep.usercode.counts import Counts, alike


def set_by_first(
    counts: Counts, other_batch: Callable[[], object], same_batch: Callable[[], object]
) -> str:
    """Find what only the first pass sets, if it depends on the batch: its name, or empty.

    Args:
        counts: of what model and loss kept before their first pass; that one is done.
        other_batch: runs a pass with another batch.
        same_batch: runs one with the batch of the first pass.
    """
    if not (from_same := counts.first_set()):
        return ""
    counts.put_back()
    other_batch()
    from_other = counts.first_set()
    same_batch()
    left = counts.first_set()
    for name in from_same.keys() & from_other.keys() & left.keys():
        value = from_other[name]
        if alike(left[name], value) and not alike(from_same[name], value):
            return name
    return ""
