"""What `instep audit` answers: is the ledger of a run what its job says it must be?

Two questions about the committed steps: is every position of every epoch in the
ledger exactly once (`store/audit.py`), and do the records of each step cover exactly
the positions that the job gives to that step (`untiled`)? A run that is still going
on, or that a crash cut short, is checked as far as it got, and the answer says how far
that is. Nothing is written. Way in: `prove`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.data.order import position
from instep.events import LEDGER, LEDGER_START
from instep.store.audit import Audit, EpochAudit, Stretch
from instep.store.run_folder import Records, RunFolder
from instep.units import readable_count
from instep.words import command, plural, ranges

_MOST_LINES = 20  # of epochs with a fault, and of steps


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the ledger of a run says, and whether it is what it must be."""

    run: Path
    outcome: str
    """As in the summary: `completed`, `unfinished`, ..."""

    last_step: int
    """The last committed step; the proof covers the steps up to it."""

    planned_steps: int | None
    """Steps of the whole job; None before a worker has said so, and in the user's own loop."""

    records: int
    """Whole records in the ledger."""

    beyond: int
    """Records of steps after `last_step`: not yet committed, if the run did not end well."""

    torn_bytes: int
    """Bytes at the end of the file, too few for a record."""

    epoch_samples: int
    """Samples of the training set; 0 before a worker has said so."""

    audit: Audit
    skipped: int
    """Positions of committed steps whose samples could not be read and were left out."""

    untiled: tuple[int, ...]
    """Steps whose records do not tile the positions of their global batch."""

    @property
    def exact(self) -> bool:
        """Whether each sample that was due was used once, in the step in which it was due."""
        over = self.outcome in ("completed", "stopped")
        known = self.epoch_samples > 0 or not self.records
        return self.audit.exact and not self.untiled and known and not (over and self.beyond)

    @property
    def fault(self) -> str:
        """What is not exact, in one sentence."""
        if not self.epoch_samples:
            return (
                f"nothing can be proved about {self.run}: the size of its training set is not in "
                "events.jsonl, and without it the ledger says too little."
            )
        counts = {
            "missing": self.audit.missing,
            "repeated": self.audit.repeated,
            "not due": self.audit.stray,
        }
        parts = [f"{readable_count(n)} samples {what}" for what, n in counts.items() if n]
        if self.untiled:
            parts.append(f"{plural(len(self.untiled), 'step')} with positions that are not its own")
        if self.beyond and not parts:
            parts.append(f"{plural(self.beyond, 'record')} after the last step")
        return (
            f"the ledger of {self.run} is not exact up to step {self.last_step}: "
            f"{', '.join(parts)}. Either the file was damaged, or the run did not train on what "
            "its job says."
        )

    def as_table(self) -> dict[str, Any]:
        """The proof as plain data; epochs count from 0, positions are [first, stop)."""
        names = ("last_step", "planned_steps", "records", "beyond", "torn_bytes", "epoch_samples")
        return {
            "run": str(self.run),
            "exact": self.exact,
            "outcome": self.outcome,
            **{name: getattr(self, name) for name in names},
            "used": self.audit.used,
            "repeated": self.audit.repeated,
            "missing": self.audit.missing,
            "stray": self.audit.stray,
            "epochs": [
                {**asdict(each), "faults": [fault._asdict() for fault in each.faults]}
                for each in self.audit.epochs
            ],
            "skipped": self.skipped,
            "untiled_steps": list(self.untiled),
            "sha256": self.audit.sha256,
        }

    def lines(self) -> list[str]:
        """The proof for a person; the last line is the next command."""
        lines = [self._coverage()]
        if self.last_step and self.epoch_samples:
            lines += [*self._epochs(), *self._steps(), *self._left_out(), self._total()]
            lines.append(f"sha256  {self.audit.sha256} of every (epoch, position)")
        return [*lines, f"next    {command('report', self.run)}"]

    def _coverage(self) -> str:
        planned = f" of {readable_count(self.planned_steps)}" if self.planned_steps else ""
        parts = [f"{self.outcome}", f"{readable_count(self.last_step)}{planned} steps committed"]
        parts.append(f"{plural(self.records, 'record')} in the ledger")
        if self.beyond:
            parts.append(f"{readable_count(self.beyond)} of them after the last committed step")
        if self.torn_bytes:
            parts.append(f"the last {self.torn_bytes} bytes are not a whole record")
        return "covers  " + ", ".join(parts)

    def _epochs(self) -> Iterator[str]:
        good = [epoch for epoch in self.audit.epochs if epoch.exact]
        whole = [epoch.epoch + 1 for epoch in good if epoch.expected == self.epoch_samples]
        if whole:
            several = " each" if len(whole) > 1 else ""
            samples = readable_count(self.epoch_samples)
            yield f"epoch   {ranges(whole)}: {samples} samples{several}, each exactly once"
        for epoch in good:
            if epoch.expected != self.epoch_samples:
                so_far = f"{readable_count(epoch.expected)} of {readable_count(self.epoch_samples)}"
                yield f"epoch   {epoch.epoch + 1}: {so_far} samples so far, each exactly once"
        bad = [epoch for epoch in self.audit.epochs if not epoch.exact]
        yield from map(_faulty_epoch, bad[:_MOST_LINES])
        if len(bad) > _MOST_LINES:
            yield f"fault   {len(bad) - _MOST_LINES} more epochs with faults"

    def _steps(self) -> Iterator[str]:
        if not self.untiled:
            yield "steps   each took exactly the positions that the job gives it"
            return
        shown = ranges(self.untiled, _MOST_LINES)
        yield f"fault   step {shown}: not exactly the positions that the job gives it"

    def _left_out(self) -> Iterator[str]:
        if self.skipped:
            which = plural(self.skipped, "position")
            yield f"skipped {which}: the sample could not be read and was left out of its step"

    def _total(self) -> str:
        return f"total   {readable_count(self.audit.used)} samples used, {fault_counts(self.audit)}"


def fault_counts(audit: Audit | EpochAudit, *, zeros: bool = True) -> str:
    """`3 repeated, 0 missing, 0 not due`; without `zeros` only what is above 0."""
    counts = {"repeated": audit.repeated, "missing": audit.missing, "not due": audit.stray}
    return ", ".join(f"{readable_count(n)} {what}" for what, n in counts.items() if n or zeros)


def prove(folder: RunFolder) -> Proof:
    """Check everything that a run has committed by now; writes nothing."""
    file = folder.path / "ledger.bin"
    size = file.stat().st_size if file.is_file() else 0
    samples, batch = folder.epoch_samples, folder.spec.train.global_batch
    off: Iterable[int] = (
        untiled(folder.committed, samples, batch, folder.last_step) if samples else ()
    )
    return Proof(
        run=folder.path,
        outcome=folder.outcome,
        last_step=folder.last_step,
        planned_steps=folder.last("worker_ready").get("last_step"),
        records=len(folder.ledger),
        beyond=len(folder.ledger) - len(folder.committed),
        torn_bytes=(size - LEDGER_START) % LEDGER.itemsize if size > LEDGER_START else 0,
        epoch_samples=samples,
        audit=folder.audit,
        skipped=len(folder.skipped),
        untiled=tuple(int(step) for step in off),
    )


def untiled(ledger: Records, samples: int, global_batch: int, last_step: int) -> NDArray[np.int64]:
    """Steps whose records are not exactly the positions of their global batch, in order.

    The shares of a step may be cut anywhere and come in any order; sorted, they must begin
    where its global batch begins, follow each other without gap or overlap, end where it
    ends, and be of its epoch.

    Args:
        ledger: [records] of `events.LEDGER`; empty shares are allowed.
        samples: positions of one epoch.
        global_batch: positions of one step.
        last_step: the last committed step, from 1.

    Returns:
        [any] steps. Those up to `last_step` that have no record are among them.
    """
    real = ledger[ledger["stop"] != ledger["first"]]
    real = real[np.lexsort((real["first"], real["step"]))]
    step = real["step"]
    strange = step[(step < 1) | (step > last_step)]
    real = real[(step >= 1) & (step <= last_step)]
    step, first, stop = real["step"], real["first"], real["stop"]
    fixed = (position(number, samples, global_batch) for number in range(1, last_step + 1))
    due = np.fromiter(chain.from_iterable(fixed), np.int64, count=3 * last_step)
    epoch, begin, end = due.reshape(-1, 3)[step - 1].T
    changes = step[1:] != step[:-1]
    opens, closes = np.append(True, changes)[: len(step)], np.append(changes, True)[: len(step)]
    joins = first == np.where(opens, begin, np.append(0, stop[:-1])[: len(step)])
    good = joins & (real["epoch"] == epoch) & (~closes | (stop == end))
    absent = np.setdiff1d(np.arange(1, last_step + 1), step)
    return np.unique(np.concatenate([step[~good], absent, strange])).astype(np.int64)


def _faulty_epoch(epoch: EpochAudit) -> str:
    words = fault_counts(epoch, zeros=False)
    due, used = readable_count(epoch.expected), readable_count(epoch.used)
    where = ", ".join(map(_place, epoch.faults))
    return f"fault   epoch {epoch.epoch + 1}: {due} due, {used} used: {words}; first at {where}"


def _place(fault: Stretch) -> str:
    what = "not due" if fault.what == "stray" else fault.what
    if fault.stop - fault.first == 1:
        return f"position {fault.first} ({what})"
    return f"positions {fault.first} to {fault.stop - 1} ({what})"
