"""How fast batches are predicted: for lines of progress, and for how long one may take.

The master of predictions (`master.py`) says what happened, and when.
"""

from __future__ import annotations

from instep.client.predict.batches import PredictBatches
from instep.client.predict.replicas import PredictProcess, PredictReplica
from instep.comm.protocol.messages import COMPILING, READING
from instep.system.limits import STEPS, UNKNOWN_S
from instep.units import readable_seconds

FIRST_S = 600.0
"""How long a worker may take to predict the first batch of all, and to compile."""

SAID_S = 2.0
"""Seconds between two lines of progress."""


class Pace:
    """Of one command.

    Args:
        batches: what is done, and where workers were lost.
        now: on the monotonic clock.
    """

    def __init__(self, batches: PredictBatches, now: float) -> None:
        self._batches, self._said = batches, now
        self._first: float | None = None  # when the first batch was done
        self._longest_s: float | None = None  # without progress, of a replica that continued

    def moves(self, replica: PredictReplica, process: PredictProcess, now: float) -> None:
        """A process of a replica has made progress."""
        if replica.turns and self._first is not None:
            self._longest_s = max(self._longest_s or 0.0, now - replica.since)
        process.since = now

    def predicts(self, now: float) -> None:
        """A batch is done."""
        if self._first is None:
            self._first = now

    def limit_s(self, process: PredictProcess, at: int) -> float:
        """How long a process may take for what it does at a batch; each that was lost there by
        itself doubles it."""
        usual = UNKNOWN_S
        if self._longest_s is not None:
            usual = max(usual, 2 * STEPS * self._longest_s)
        elif process.at[0] != READING:
            usual = FIRST_S
        if process.at[0] == COMPILING:
            usual = max(usual, FIRST_S)
        return float(usual * 2 ** self._batches.times(at))

    def end_hung(self, replica: PredictReplica, now: float) -> None:
        """End the process that a replica has waited for too long."""
        process = replica.slowest()
        if process is None or process.system.ended:
            return
        limit_s = self.limit_s(process, replica.batch_of(process))
        if now - replica.since > limit_s:
            process.kill(f"it got nothing done for {readable_seconds(limit_s)}")
            process.hung = True

    def line(self, now: float) -> str:
        """A line of progress, now and then; else an empty text."""
        batches, rate = self._batches, ""
        if now - self._said < SAID_S or not batches.samples:
            return ""
        self._said = now
        new = len(batches.done) - batches.before
        if self._first is not None and new > 1:
            per_s = (new - 1) * batches.size / max(now - self._first, 1e-9)
            rate = f", {per_s:,.0f} samples/s"
        return f"batch {len(batches.done):,} of {batches.total:,}{rate}"
