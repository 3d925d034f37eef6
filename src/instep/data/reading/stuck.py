"""Whether a process can still go on: it waits for a lock that none of its threads holds.

A fork copies memory, and of the threads only the one that forks. What belongs to the others, such
as a library's own pool of threads, is copied as if they were there, so whoever asks it for work
waits for ever. Linux shows that: all threads sleep in a futex of this process alone, without a
timeout, and nothing moves. A process that waits for long in anything else may wait for storage, or
ask again and again for what a missing thread was to do: that is worth a word, and after very long
another try elsewhere. What to do about it is not decided here.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Literal, NamedTuple

LOOK_S = 0.5
"""Seconds between two looks."""

STUCK_S = 2.0
"""Seconds without any movement after which what looks stuck is stuck."""

IDLE_S = 8.0
"""Seconds at one read, without computing, after which a process that may wait for storage is
named."""

HUNG_S = 32.0
"""Such seconds after which others read. It is more than the master allows a worker's first attempt
at a read, and less than it allows the second."""

_COMPUTES = 0.1
"""Share of a processor that a process uses which computes; one that polls uses far less."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_PRIVATE, _COMMAND = 128, 127
_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET


class Threads(NamedTuple):
    """What the system says of all threads of a process that sleeps."""

    moves: tuple[str, ...]
    """Differs after any thread has run."""
    locked: bool
    """Whether each waits without end for a lock of this process."""


def threads_of(pid: int) -> Threads | None:
    """The threads of a process of this machine; None if one runs, or the system does not say."""
    folder = f"/proc/{pid}/task"
    try:
        names = sorted(os.listdir(folder))
        seen = [_thread(f"{folder}/{name}") for name in names]
    except (OSError, IndexError, ValueError):
        return None
    if not seen or not all(seen):
        return None
    found = [each for each in seen if each is not None]
    return Threads(tuple(moves for moves, _ in found), all(locked for _, locked in found))


def _thread(folder: str) -> tuple[str, bool] | None:
    """What changes when it runs, and whether it waits for a lock; None unless it sleeps."""
    fields = _text(f"{folder}/stat").rpartition(")")[2].split()
    if fields[0] not in "SD":
        return None
    switches = [row for row in _text(f"{folder}/status").split("\n") if "ctxt_switches" in row]
    return " ".join([folder, fields[11], fields[12], *switches]), _waits_for_lock(folder)


def _waits_for_lock(folder: str) -> bool:
    try:
        number, _, what, _, timeout, *_ = _text(f"{folder}/syscall").split()
    except (OSError, ValueError):  # not allowed, or `running`
        return False
    operation = int(what, 16)
    private = bool(operation & _PRIVATE) and operation & _COMMAND in _WAITS
    return int(number) == _FUTEX and private and int(timeout, 16) == 0


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used; 0.0 where the system does not say."""
    try:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


class StuckWatch:
    """Watches one process that is waited for, until its next answer.

    Args:
        look: returns the threads of a process.
        cpu: returns the CPU seconds that it has used.
    """

    def __init__(
        self,
        look: Callable[[int], Threads | None] = threads_of,
        cpu: Callable[[int], float] = cpu_of,
    ) -> None:
        self._look, self._cpu = look, cpu
        self._last: Threads | None = None
        self._still_since = 0.0
        self._at: tuple[int, object] | None = None
        self._since = self._used_s = 0.0
        self._named = False

    def turn(
        self, pid: int, now: float, read: object = None
    ) -> Literal["", "idle", "hung", "stuck"]:
        """What is to be said of it: it can never go on; or it has been at one read for very long,
        or for long (once), without computing.

        Args:
            pid: of the process; another one starts anew.
            now: seconds, on any steady clock.
            read: what it reads; another starts anew.
        """
        seen, used_s = self._look(pid), self._cpu(pid)
        if self._at != (pid, read):
            self._at, self._since, self._used_s = (pid, read), now, used_s
        if seen is None or seen != self._last:
            self._last, self._still_since = seen, now
        elif seen.locked and now - self._still_since >= STUCK_S:
            return "stuck"
        waited_s = now - self._since
        if used_s - self._used_s > _COMPUTES * waited_s:
            return ""
        if waited_s >= HUNG_S:
            return "hung"
        if waited_s >= IDLE_S and not self._named:
            self._named = True
            return "idle"
        return ""
