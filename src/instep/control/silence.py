"""Finds workers that give no sign of life, in a run whose workers cannot be replaced.

Under `instep.join`, and on GPUs, a worker that is stopped or hangs ends the run: the others
would wait for it without end. As this cannot be undone, the timeouts are longer than where
workers are replaced (`watch.py`), and only signs of life count, not progress: a loop of the
user's own may compute, compile or download for any time. Where all are silent at once, as
after Ctrl-Z, a user may wake them. Pure: times are given, and no action is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from instep.control.lease import LOOK_S
from instep.system.limits import FLOOR_S
from instep.units import readable_seconds

SILENT_S = 60.0
"""How long a worker may give no sign of life while another does: a call that keeps the
interpreter's lock, such as a compilation, gives none either."""

ALL_SILENT_S = 600.0
"""How long all workers may give none."""

LIVES_S = FLOOR_S
"""A worker whose last sign of life is not older is alive; they come five times a second."""


class Silent(NamedTuple):
    """A worker that was silent for too long."""

    worker: int
    seconds: float
    """Since its last sign of life."""
    all: bool
    """Whether all other workers were silent too."""

    def cause(self, pid: int, node: str, *, stopped: bool, joined: bool) -> str:
        """The cause to report.

        Args:
            pid: of its process; 0 if it is not known.
            node: the name of its machine; empty if it is not known.
            stopped: whether the system says that its process does not run.
            joined: whether another program than instep started it.
        """
        where = f" (pid {pid}{f' on {node}' if node else ''})" if pid else ""
        long = readable_seconds(self.seconds)
        how = f"its process{where} gave no sign of life for {long}"
        how += ", nor did any other worker" if self.all else " while others did"
        how += (
            ": it was stopped (SIGSTOP, Ctrl-Z)"
            if stopped
            else ": it may be stopped, or native code keeps the interpreter's lock"
        )
        return f"{how}. It cannot be replaced {'under instep.join' if joined else 'on GPUs'}."


class Silence:
    """For how long each worker has given no sign of life.

    Only time in which this one ran itself counts: after a machine slept, no worker is blamed.
    """

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._alone_s: dict[int, float] = {}  # that each was silent while another lived
        self._all_s = 0.0
        self._looked: float | None = None

    def hears(self, worker: int, now: float) -> None:
        """A worker gives a sign of life; from the first on, more are expected."""
        self._heard[worker], self._alone_s[worker], self._all_s = now, 0.0, 0.0

    def leaves(self, worker: int) -> None:
        """No more signs of life are expected of a worker."""
        self._heard.pop(worker, None)
        self._alone_s.pop(worker, None)

    def turn(self, now: float) -> Silent | None:
        """Let time pass; returns a worker that was silent for too long, if there is one."""
        seen_s = min(now - self._looked, LOOK_S) if self._looked is not None else 0.0
        self._looked = now
        silent = [worker for worker, heard in self._heard.items() if now - heard > LIVES_S]
        if not silent:
            return None
        everybody = len(silent) == len(self._heard)
        if everybody:
            self._all_s += seen_s
        else:
            self._all_s = 0.0
            for worker in silent:
                self._alone_s[worker] += seen_s
        long = self._all_s > ALL_SILENT_S
        late = silent if long else [w for w in silent if self._alone_s[w] > SILENT_S]
        if not late:
            return None
        first = min(late, key=lambda worker: (self._heard[worker], worker))
        return Silent(first, now - self._heard[first], long)
