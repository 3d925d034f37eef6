"""Events over things that do one at a time: a direction of a link, a server's line, a core.

What asks first is served first, and who asks when is decided by whoever calls `use`, in an order
that does not depend on times. So a thing that takes less time never makes a later one end later.
Way in: `Timeline`.
"""

from __future__ import annotations

from collections.abc import Iterable


class Timeline:
    """When each thing is free again."""

    def __init__(self) -> None:
        self._free: dict[str, float] = {}

    def use(self, things: Iterable[str], ready: float, seconds: float) -> float:
        """Use several things at once for some time, from when all of them are free.

        Args:
            things: names; none where nothing is needed but time.
            ready: earliest begin.
            seconds: how long.

        Returns:
            When it ends.
        """
        names = list(things)
        begin = max([ready, *(self._free.get(name, 0.0) for name in names)])
        for name in names:
            self._free[name] = begin + seconds
        return begin + seconds

    def free(self, thing: str) -> float:
        """When a thing is free."""
        return self._free.get(thing, 0.0)
