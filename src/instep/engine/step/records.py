"""Records of committed steps: who computed what, in the ledger; how long it took, to the master.

One rank of a generation writes the ledger. Another thread may have it let go of the file at any
moment, where this worker is cut off: then the worker that continues writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.engine.assignment import Lockstep
from instep.engine.clock import Clock
from instep.engine.member import Member
from instep.engine.state.committed import Commit
from instep.store.ledger import Ledger, mend
from instep.sync.norm import recorded


class StepRecords:
    """Writes down the steps of one worker.

    Args:
        member: this worker's membership in the run.
    """

    mends = True
    """Whether the ledger is cut to the last complete step when a generation begins."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """The ledger; on rank 0, which writes it."""
        assert self._ledger is not None, "rank 0 writes the ledger"
        return self._ledger

    def mend(self, step: int, rows: Sequence[tuple[int, ...]]) -> None:
        """Cut the ledger to the last step, or write its rows down, if they are not there."""
        if self.mends:
            member = self._member
            mend(member.run / "ledger.bin", step, rows, wait=member.waits_for_writer)

    def begin(self) -> None:
        """Open the ledger: this rank writes it in the generation that begins."""
        member = self._member
        self._ledger = Ledger(member.run / "ledger.bin", wait=member.waits_for_writer)

    def end(self) -> None:
        """Close it; the generation is over."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def hold(self) -> None:
        """Write nothing more in this generation; for another thread."""
        ledger = self._ledger
        if ledger is not None:
            ledger.release()

    def write(self, rows: Sequence[tuple[int, ...]]) -> bytes:
        """Append a step to the ledger, on the rank that writes it; the bytes that were written.

        Where this worker has been cut off since parameters began to move, the ledger is left
        to the worker that continues from what it holds.
        """
        if self._ledger is None or self._member.lease.fenced:
            return b""
        written = self._ledger.append(rows)
        if not written:  # another thread has let go of the file
            self._member.lease.fence()
        return written

    def tell(self, done: Commit, samples: int, clock: Clock, written: bytes = b"") -> None:
        """Tell the master of a step.

        Args:
            done: the commit.
            samples: that this worker computed.
            clock: of the step.
            written: into the ledger.
        """
        number, norm = self._member.number, recorded(done.norm)
        self._member.records.add(
            written, (done.step, number, samples, done.loss, *clock.parts, norm)
        )

    def tell_deal(self, assignment: Lockstep, step: int, why: str) -> None:
        """Log who computes what from a step on, and why that has changed."""
        micro_batches, speeds = assignment.dealt()
        self._member.emit(
            "work_dealt",
            generation=assignment.form.generation,
            step=step,
            members=assignment.workers,
            micro_batches=micro_batches,
            speeds=speeds,
            reason=why,
        )
