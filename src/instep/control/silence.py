"""Who gives no sign of life in a run whose workers nobody can replace.

Under `instep.join`, and on GPUs, a worker that is stopped or hangs ends the run: the others
would wait for it without end. As that cannot be undone there is more patience than where
another takes its place (`watch.py`), and only signs of life count, not what gets done: a loop
of the user's own may compute, compile or download for as long as it likes. Where all are
silent at once, as after Ctrl-Z, somebody may wake them. Pure: times are given, and nothing is
done about anybody.
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
"""Who was heard so recently lives; signs come five times a second."""


class Silent(NamedTuple):
    """A worker that was silent for too long."""

    worker: int
    seconds: float
    """Since it was heard last."""
    all: bool
    """Whether nobody else was heard either."""

    def cause(self, pid: int, node: str, *, stopped: bool, joined: bool) -> str:
        """What is to be said of it.

        Args:
            pid: of its process; 0 where that is not known.
            node: the name of its machine; empty where that is not known.
            stopped: whether the system says that its process does not run.
            joined: whether others than instep started it.
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
        return f"{how}. Nobody can take its place {'under instep.join' if joined else 'on GPUs'}."


class Silence:
    """For how long each worker has given no sign of life.

    Only time that was seen to pass counts: where whoever looks on was away itself, as on a
    machine that slept, nobody is blamed for it.
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
        """Nothing more is expected of a worker."""
        self._heard.pop(worker, None)
        self._alone_s.pop(worker, None)

    def turn(self, now: float) -> Silent | None:
        """The time; who was silent for too long, if anybody was."""
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
