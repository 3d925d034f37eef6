"""A lease on a process of this machine, which each of its signs of life renews.

The exit of a process can be seen. A process that was stopped, that waits for a disk which
does not answer, or whose loop hangs, shows it only by its silence. The timeout is 1.2 s if
the system says that the process was stopped, otherwise ten seconds or two and a half times
its longest silence so far. Time does not count in which it waits for a processor, in which
it reads or writes much (a checkpoint), or in which its watchdog did not run itself: on an
overloaded machine no process is blamed. Callers decide what follows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from instep.system.limits import FLOOR_S, LOOK_S, STEPS, UNKNOWN_S
from instep.system.processes import stat_fields

HUNG_S = 10.0
"""How long a process that runs may give no sign."""

FIRST_SIGN_S = UNKNOWN_S
"""The same, before its first: it may have to import much."""

MOST_S = 120.0
"""No process may be silent for longer, however long one was."""

MOVED_BYTES = 1 << 16
"""A process that has read or written so much since the last look makes progress."""


class Facts(NamedTuple):
    """What the system says of a process; the defaults where it does not."""

    stopped: bool = False
    starved: bool = False
    """Whether it has work, and waits for a processor."""
    cpu_s: float = 0.0
    """Seconds that its first thread has had a processor."""
    waited_s: float = 0.0
    """Seconds that it has waited for one, as far as they are counted yet."""
    moved_bytes: int = 0
    """That it has read and written."""


def facts_of(pid: int) -> Facts:
    """What Linux says; the defaults elsewhere."""
    state, cpu_s, waited_s, moved = "", 0.0, 0.0, 0
    folder = Path(f"/proc/{pid}")
    state = "".join(stat_fields(pid)[:1])
    with contextlib.suppress(OSError, ValueError):
        cpu_s, waited_s = (int(n) / 1e9 for n in (folder / "schedstat").read_text().split()[:2])
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (folder / "io").read_text().splitlines()[:2]
        moved = sum(int(line.split()[1]) for line in lines)
    return Facts(state == "T", state == "R", cpu_s, waited_s, moved)


class Lease:
    """One process, as its watchdog sees it.

    Args:
        pid: of a process on this machine.
        now: seconds on a steady clock.
        first_s: how long it may take to give its first sign.
        longest_s: the longest silence after which a predecessor continued.
        times: how often in a row its predecessors were lost by silence; each doubles the timeout.
        look: asks the system.
    """

    def __init__(
        self,
        pid: int,
        now: float,
        *,
        first_s: float = FIRST_SIGN_S,
        longest_s: float = 0.0,
        times: int = 0,
        look: Callable[[int], Facts] = facts_of,
    ) -> None:
        self.pid, self._look, self._limit_s, self._times = pid, look, first_s, times
        self.longest_s = longest_s
        self.signs = 0
        """How many it has given."""
        self._looked, self._silent_s, self._stopped_s = now, 0.0, 0.0
        self._facts: Facts | None = None

    def renew(self, now: float) -> None:
        """It has given a sign of life."""
        self._pass(now)
        if self.signs:  # the time before the first does not count
            self.longest_s = max(self.longest_s, self._silent_s)
        self.signs += 1
        self._limit_s = min(MOST_S, max(HUNG_S, STEPS * self.longest_s) * 2**self._times)
        self._silent_s = self._stopped_s = 0.0
        self._facts = None

    def turn(self, now: float) -> str:
        """Let time pass; returns how it hangs, or an empty text."""
        since_s = self._pass(now)
        if self._silent_s < LOOK_S:
            return ""
        before, facts = self._facts, self._look(self.pid)
        self._facts = facts
        if before is not None:
            self._silent_s -= _excused_s(before, facts, since_s)
            if facts.moved_bytes - before.moved_bytes >= MOVED_BYTES:
                self._silent_s = 0.0
        self._stopped_s = self._stopped_s + since_s if facts.stopped else 0.0
        for seconds, limit_s, how in (
            (self._stopped_s, FLOOR_S, "it was stopped"),
            (self._silent_s, self._limit_s, "it gave no sign of life"),
        ):
            if seconds > limit_s:
                return f"{how} for {seconds:.1f} s"
        return ""

    def _pass(self, now: float) -> float:
        """Let time pass; returns how much of it the watchdog has seen."""
        seen_s = min(now - self._looked, LOOK_S)
        self._looked = now
        self._silent_s += seen_s
        return seen_s


def _excused_s(before: Facts, facts: Facts, since_s: float) -> float:
    """For how much of the time it waited for a processor."""
    if facts.starved and facts.cpu_s and facts.cpu_s == before.cpu_s:
        return since_s  # it waits still, which is counted when it has one
    return min(since_s, max(0.0, facts.waited_s - before.waited_s))


class SignsOfLife:
    """The end of a pipe on which a process shows that it lives; never waits.

    Args:
        pipe: a file descriptor to write to; below 0 for none.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        if pipe >= 0:
            os.set_blocking(pipe, False)

    def show(self) -> None:
        """One sign.

        Raises:
            BrokenPipeError: the watchdog has ended.
        """
        if self._pipe >= 0:
            with contextlib.suppress(BlockingIOError):  # the watchdog has not read for long
                os.write(self._pipe, b".")


NO_WATCHDOG = SignsOfLife(-1)
"""For a process that has no watchdog."""
