"""Kills loader processes that loop or were stopped, so that they are replaced.

While a worker waits for a read in a loader process, its own CPU time does not show whether the
read loops or the storage stalls. So the thread that sends heartbeats watches the loader
processes too. `data/reading/loader_process.py` replaces the killed process and repeats its reads.
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
"""A process that runs, or is ready to, at this share of the looks does not wait for a disk."""

ENOUGH_S = UNKNOWN_S - FLOOR_S
"""Time for a first read, whose usual time is not known, and for a second attempt. It is less than
what the master allows the worker, so the loader process is killed before the worker is."""

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Seen(NamedTuple):
    """The state of a process, as the system reports it."""

    stopped: bool
    runs: bool
    """Whether it runs, or would if a processor were free."""
    cpu_s: float


def seen(pid: int) -> Seen | None:
    """The state of a process of this machine; None if it is gone, or not known."""
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
    """Watches the loader processes of one worker.

    Args:
        look: returns the state of a process.
        kill: kills a process.
    """

    def __init__(
        self, look: Callable[[int], Seen | None] = seen, kill: Callable[[int], None] = end
    ) -> None:
        self._look, self._kill = look, kill
        self.ended = 0
        """How many were killed; counts as progress of the worker."""
        self._longest_s = 0.0  # of the worker's waits for a read that ended
        self._tries = 0  # attempts at the present read that were killed
        self._at: tuple[object, ...] = ()
        self._since = 0.0
        self._cpu: dict[int, float] = {}
        self._runs: dict[int, list[bool]] = {}
        self._stopped: dict[int, float] = {}

    def turn(
        self, now: float, pids: Sequence[int], *, at: tuple[object, ...], waits: bool, known: bool
    ) -> None:
        """Look at the processes, and kill those that loop or were stopped.

        Args:
            now: seconds, on any steady clock.
            pids: of the loader processes.
            at: changes with all progress of the worker.
            waits: whether the worker may be waiting for one of them.
            known: whether it has finished the reads of a step before.
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
        """The second attempt has half a minute; later ones are short, as they only confirm it."""
        usual = max(FLOOR_S, STEPS * self._longest_s)
        if self._tries > 1:
            return FLOOR_S
        return max(ENOUGH_S, usual) if self._tries or not known else usual
