"""Notices workers that reach the master and do not reach each other any more: no group lasts.

A network that is parted is waited for, without end, as it may come back. The user is told once.
Where they have never reached each other, `crash_loop.py` ends the run.
"""

from __future__ import annotations

from instep.words import plural

MOST_APART = 3
"""Groups in a row that came apart before a step was committed."""


class Parted:
    """Counts groups since the last commit."""

    def __init__(self) -> None:
        self._committed, self._broken = -1, 0
        self._told = False
        self._cause = ""  # what a worker has said last

    def note(self, cause: str) -> None:
        """A worker says why its group came apart; empty if it does not know."""
        self._cause = cause or self._cause

    def look(self, committed: int, broken: int) -> str:
        """What to tell the user; empty if nothing, or it is told already.

        Args:
            committed: the last step.
            broken: how many groups have come apart so far.
        """
        if committed != self._committed:
            self._committed, self._broken, self._told = committed, broken, False
        times = broken - self._broken
        if self._told or times < MOST_APART or committed < 1:
            return ""
        self._told = True
        cause = f" ({self._cause.rstrip('.')})" if self._cause else ""
        return (
            f"the group of the workers has come apart {plural(times, 'time')} since the last step"
            f"{cause}, though each reaches the master. Look whether they reach each other: all "
            "ports between their hosts have to be open. It is tried again."
        )
