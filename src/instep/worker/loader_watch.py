"""Loader processes that loop or were stopped: ended, so that others read in their place.

A worker that reads in processes cannot tell a read that loops from a store that
stalls by its own processor time. So whoever shows the master that the worker
lives looks after its loader processes too, while the worker waits for one of them.
That one is replaced, with its reads, is the business of `data/reading/pool.py`.
Pure but for the two functions that it is given.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from instep.system.limits import BUSY, FLOOR_S, STEPS, UNKNOWN_S
from instep.system.processes import stat_fields

ALWAYS = 0.8
"""Who runs, or would, at such a share of the looks does not wait for a disk."""

ENOUGH_S = UNKNOWN_S - FLOOR_S
"""What a read has that nothing is known of, and a second attempt: then it is ended here, before who
watches the worker gives up the worker for it."""

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Seen(NamedTuple):
    """What the system tells of a process."""

    stopped: bool
    runs: bool
    """Whether it would use a processor if it had one: others may keep them busy."""
    cpu_s: float


def seen(pid: int) -> Seen | None:
    """Of a process of this machine; None if it is gone, or the system does not tell."""
    fields = stat_fields(pid)
    try:
        return Seen(
            fields[0] == "T", fields[0] == "R", (int(fields[11]) + int(fields[12])) / _TICKS
        )
    except IndexError:
        return None


def end(pid: int) -> None:
    """SIGKILL, if it lives."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


class LoaderWatch:
    """Looks after the loader processes of one worker.

    Args:
        look: at a process.
        kill: one.
    """

    def __init__(
        self, look: Callable[[int], Seen | None] = seen, kill: Callable[[int], None] = end
    ) -> None:
        self._look, self._kill = look, kill
        self.ended = 0
        """How many were; it counts as something that the worker gets done."""
        self._longest_s = 0.0  # that the worker waited for a read, and got it
        self._tries = 0  # of the present read that were given up
        self._at: tuple[object, ...] = ()
        self._since = 0.0
        self._cpu: dict[int, float] = {}
        self._runs: dict[int, list[bool]] = {}
        self._stopped: dict[int, float] = {}

    def turn(
        self, now: float, pids: Sequence[int], *, at: tuple[object, ...], waits: bool, known: bool
    ) -> None:
        """Look at them, and end those that loop or were stopped.

        Args:
            now: seconds, on any steady clock.
            pids: of the loader processes.
            at: changes with everything that the worker gets done.
            waits: whether it can be waiting for one of them.
            known: whether it has come to the end of a step's reads before.
        """
        if not waits:
            self._begin(now)
            return
        if at != self._at:
            if self._at and known:
                self._longest_s = max(self._longest_s, now - self._since)
            self._at, self._tries = at, 0
            self._begin(now)
            return
        for pid in pids:
            found = self._look(pid)
            if found is None or self._is_well(pid, found, now, known):
                continue
            self._tries += not found.stopped
            self.ended += 1
            self._kill(pid)
            self._begin(now)
            return

    def _begin(self, now: float) -> None:
        self._since = now
        self._cpu.clear()
        self._runs.clear()
        self._stopped.clear()

    def _is_well(self, pid: int, found: Seen, now: float, known: bool) -> bool:
        if found.stopped:
            return now - self._stopped.setdefault(pid, now) <= FLOOR_S
        self._stopped.pop(pid, None)
        busy_s, waited_s = found.cpu_s - self._cpu.setdefault(pid, found.cpu_s), now - self._since
        runs = self._runs.setdefault(pid, [])
        runs.append(found.runs)
        loops = busy_s >= BUSY * waited_s or sum(runs) >= ALWAYS * len(runs)
        return waited_s <= self._limit_s(known) or not loops

    def _limit_s(self, known: bool) -> float:
        """The second attempt has half a minute; once that was in vain, more only confirm it."""
        usual = max(FLOOR_S, STEPS * self._longest_s)
        if self._tries > 1:
            return FLOOR_S
        return max(ENOUGH_S, usual) if self._tries or not known else usual
