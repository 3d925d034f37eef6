"""How many workers each trial has: a pure function of those that are not over.

It decides how long trials take, and nothing of what comes of them. Way in: `allot`.
"""

from __future__ import annotations

from collections.abc import Sequence


def allot(waiting: Sequence[int], capacity: int, unit: int, most: int) -> dict[int, int]:
    """Workers for each trial that is to run now; the others wait.

    Trials are told in order, so the first ones get what is left over.

    Args:
        waiting: numbers of the trials that are not over, in order.
        capacity: workers that there is room for; one trial runs in any case.
        unit: workers are a multiple of it.
        most: that one trial can use.
    """
    places = max(1, capacity // unit)
    running = [*waiting[:places]]
    if not running:
        return {}
    found = dict.fromkeys(running, unit)
    left = places - len(running)
    while left and (growing := [n for n in running if found[n] + unit <= most]):
        fewest = min(growing, key=lambda n: (found[n], n))
        found[fewest] += unit
        left -= 1
    return found
