"""The time that a run took: its sessions, without what lay between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from instep.store.run_files import Event, Floats, Records, step_ends

Sessions = Sequence[tuple[float, float]]
"""Begin and end of each time that a run was started, Unix seconds, in order."""


def elapsed_in(sessions: Sessions, times: Floats | float) -> Floats:
    """Give Unix times as seconds of sessions; time between two of them does not count."""
    moments = np.asarray(times, dtype=np.float64)
    spent = np.zeros_like(moments)
    for begin, end in sessions:
        spent = spent + np.clip(moments, begin, end) - begin
    return spent


def seconds_of(sessions: Sessions) -> float:
    """Seconds that sessions took together."""
    return sum(end - begin for begin, end in sessions)


class RunTimes:
    """The sessions of a run, and how long it trained in them.

    Args:
        events: of the run, oldest first.
        steps: records of the steps that count, [records] of `STEPS`.
        computed: the same, with steps that were discarded.
    """

    def __init__(self, events: Iterable[Event], steps: Records, computed: Records) -> None:
        self._events, self._steps, self._computed = events, steps, computed

    @cached_property
    def sessions(self) -> list[tuple[float, float]]:
        """Begin and end of each time the run was started, Unix seconds."""
        begins = [float(e["time"]) for e in self._events if e["event"] == "run_started"]
        times = np.array([float(e["time"]) for e in self._events])
        times = np.sort(np.concatenate([times, step_ends(self._steps)]))
        if not begins:
            return [(float(times[0]), float(times[-1]))] if len(times) else []
        after = [*begins[1:], np.inf]
        last = times[np.maximum(np.searchsorted(times, after) - 1, 0)]
        return [(b, max(b, float(end))) for b, end in zip(begins, last, strict=True)]

    def elapsed(self, times: Floats | float) -> Floats:
        """Give Unix times as seconds of this run; time between two sessions does not count."""
        return elapsed_in(self.sessions, times)

    @property
    def seconds(self) -> float:
        """Seconds the run took, start-up and end included, all sessions together."""
        return seconds_of(self.sessions)

    def training_seconds(self, worker: int | None = None) -> float:
        """Sum, over the sessions, the time from the begin of the first step to the end of the last.

        Steps that were discarded and computed again count: their time was spent.

        Args:
            worker: whose steps; None for all workers'.
        """
        total = 0.0
        for mine in self._computed_by_session(worker):
            total += float(step_ends(mine).max() - mine["begin"].min())
        return total

    def within(self, ledger: Records) -> np.ndarray:
        """Find the records of a ledger whose steps lie within `training_seconds`, [records]."""
        timed = np.zeros(len(ledger), np.bool_)
        for steps in self._computed_by_session():
            first, last = steps["step"].min(), steps["step"].max()
            timed |= (ledger["step"] >= first) & (ledger["step"] <= last)
        return timed

    def _computed_by_session(self, worker: int | None = None) -> list[Records]:
        steps = self._computed
        if worker is not None:
            steps = steps[steps["worker"] == worker]
        session = np.searchsorted([begin for begin, _ in self.sessions[1:]], steps["begin"])
        return [steps[session == number] for number in np.unique(session)]
