"""What `instep audit` answers: is the ledger of a run what its job says it must be?

Two questions about the committed steps: is every position of every epoch in the
ledger exactly once (`store/audit.py`), and do the records of each step cover exactly
the positions that the job gives to that step (`untiled`)? A run that is still going
on, or that a crash cut short, is checked as far as it got, and the answer says how far
that is. The newest checkpoint has a checksum of the ledger, which is compared.
Nothing is written. Way in: `prove`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.data.batches import Batches
from instep.data.participants import OwnRounds
from instep.errors import RunError
from instep.events import LEDGER, LEDGER_START, Kind
from instep.privacy.figures import privacy_figures
from instep.privacy.proof import PrivacyProof, prove_privacy
from instep.store.audit import Audit, EpochAudit, Stretch
from instep.store.folder import id_of
from instep.store.run_files import Records
from instep.store.run_folder import RunFolder
from instep.units import readable_count
from instep.words import command, plural, ranges

_MOST_LINES = 20  # of epochs with a fault, and of steps


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the ledger of a run says, and whether it is what it must be."""

    run: RunFolder
    torn_bytes: int
    """Bytes at the end of the file, too few for a record."""

    untiled: tuple[int, ...]
    """Steps whose records do not tile the positions of their global batch."""

    @property
    def audit(self) -> Audit:
        """How often each position was used, up to the last committed step."""
        return self.run.audit

    @property
    def beyond(self) -> int:
        """Records of steps after the last committed one, if the run did not end well."""
        return len(self.run.ledger) - len(self.run.committed)

    @property
    def exact(self) -> bool:
        """Whether each sample that was due was used once, in the step in which it was due."""
        over = self.run.outcome in ("completed", "stopped")
        known = self.run.plan.epoch_samples > 0 or not len(self.run.ledger)
        sound = self.audit.exact and not self.untiled and not self.run.altered_before
        return sound and known and not (over and self.beyond)

    @property
    def fault(self) -> str:
        """What is not exact, in one sentence."""
        if not self.run.plan.epoch_samples:
            return (
                f"nothing can be proved about {self.run.path}: the size of its training set is not "
                "in events.jsonl, and without it the ledger says too little."
            )
        counts = {
            "missing": self.audit.missing,
            "repeated": self.audit.repeated,
            "not due": self.audit.stray,
        }
        parts = [f"{readable_count(n)} samples {what}" for what, n in counts.items() if n]
        if self.untiled:
            parts.append(f"{plural(len(self.untiled), 'step')} with positions that are not its own")
        if self.run.altered_before:
            parts.append(altered_words(self.run.altered_before))
        if self.beyond and not parts:
            parts.append(f"{plural(self.beyond, 'record')} after the last step")
        return (
            f"the ledger of {self.run.path} is not exact up to step {self.run.last_step}: "
            f"{', '.join(parts)}. Either the file was damaged, or the run did not train on what "
            "its job says."
        )

    def as_table(self) -> dict[str, Any]:
        """The proof as plain data; epochs count from 0, positions are [first, stop)."""
        return {
            "run": str(self.run.path),
            "exact": self.exact,
            "outcome": self.run.outcome,
            "last_step": self.run.last_step,
            "planned_steps": self.run.plan.steps,
            "records": len(self.run.ledger),
            "beyond": self.beyond,
            "torn_bytes": self.torn_bytes,
            "epoch_samples": self.run.plan.epoch_samples,
            "used": self.audit.used,
            "repeated": self.audit.repeated,
            "missing": self.audit.missing,
            "stray": self.audit.stray,
            "epochs": [
                {**asdict(each), "faults": [fault._asdict() for fault in each.faults]}
                for each in self.audit.epochs
            ],
            "skipped": len(self.run.skipped),
            "away": left_out(self.run)["away_samples"],
            "untiled_steps": list(self.untiled),
            "altered_before": self.run.altered_before,
            "sha256": self.audit.sha256,
        }

    def lines(self) -> list[str]:
        """The proof for a person; the last line is the next command."""
        lines = [self._coverage()]
        if self.run.last_step and self.run.plan.epoch_samples:
            lines += [*self._epochs(), self._steps()]
            if self.run.altered_before:
                lines.append(f"fault   {altered_words(self.run.altered_before)}")
            if self.run.skipped:
                why = "the sample could not be read and was left out of its step"
                lines.append(f"skipped {plural(len(self.run.skipped), 'position')}: {why}")
            if len(away := away_in(self.run)):
                rounds = plural(len(np.unique(away["step"])), "round")
                why = "the host that has its data was lost"
                lines.append(f"away    in {rounds} a participant was missing: {why}")
            used = readable_count(self.audit.used)
            lines.append(f"total   {used} samples used, {fault_counts(self.audit)}")
            lines.append(f"sha256  {self.audit.sha256} of every (epoch, position)")
        return [*lines, f"next    {command('report', self.run.path)}"]

    def _coverage(self) -> str:
        run = self.run
        planned = f" of {readable_count(run.plan.steps)}" if run.plan.steps else ""
        parts = [run.outcome, f"{readable_count(run.last_step)}{planned} steps committed"]
        parts.append(f"{plural(len(run.ledger), 'record')} in the ledger")
        if self.beyond:
            parts.append(f"{readable_count(self.beyond)} of them after the last committed step")
        if self.torn_bytes:
            parts.append(f"the last {self.torn_bytes} bytes are not a whole record")
        return "covers  " + ", ".join(parts)

    def _epochs(self) -> Iterator[str]:
        samples = readable_count(self.run.plan.epoch_samples)
        if self.run.plan.own_rounds is not None:
            yield from self._own_epochs(self.run.plan.own_rounds)
            return
        good = [epoch for epoch in self.audit.epochs if epoch.exact]
        if self._varies:
            for epoch in good[:_MOST_LINES]:
                taken = readable_count(epoch.expected)
                yield f"epoch   {epoch.epoch + 1}: {taken} positions, each exactly once"
            yield from self._faults()
            return
        whole = [epoch.epoch + 1 for epoch in good if epoch.expected == self.run.plan.epoch_samples]
        if whole:
            several = " each" if len(whole) > 1 else ""
            yield f"epoch   {ranges(whole)}: {samples} samples{several}, each exactly once"
        for epoch in good:
            if epoch.expected != self.run.plan.epoch_samples:
                so_far = f"{readable_count(epoch.expected)} of {samples}"
                yield f"epoch   {epoch.epoch + 1}: {so_far} samples so far, each exactly once"
        yield from self._faults()

    @property
    def _varies(self) -> bool:
        """Whether epochs differ in their positions."""
        sizes = self.run.plan.batches.sizes
        return sizes is not None and sizes.total is None

    def _own_epochs(self, own: OwnRounds) -> Iterator[str]:
        """The same, of participants with data of their own."""
        finished = own.epochs(self.run.last_step)
        least, most = int(finished.min()), int(finished.max())
        several = f"{least} to {most}" if least < most else f"{most}"
        yield (
            f"epoch   {plural(len(finished), 'participant')} with data of their own, "
            f"{readable_count(own.samples)} samples; {several} of their epochs are finished"
        )
        if self.audit.exact:
            yield "epoch   of each: each sample exactly once"
        yield from self._faults()

    def _faults(self) -> Iterator[str]:
        bad = [epoch for epoch in self.audit.epochs if not epoch.exact]
        yield from map(_faulty_epoch, bad[:_MOST_LINES])
        if len(bad) > _MOST_LINES:
            yield f"fault   {len(bad) - _MOST_LINES} more epochs with faults"

    def _steps(self) -> str:
        if not self.untiled:
            return "steps   each took exactly the samples that the job gives it"
        shown = ranges(self.untiled, _MOST_LINES)
        return f"fault   step {shown}: not exactly the positions that the job gives it"


def altered_words(step: int) -> str:
    """What is wrong with a ledger that does not match the newest checkpoint, of this step."""
    return f"records before step {step} do not match the checksum in the checkpoint of that step"


def fault_counts(audit: Audit | EpochAudit, *, zeros: bool = True) -> str:
    """`3 repeated, 0 missing, 0 not due`; without `zeros` only what is above 0."""
    counts = {"repeated": audit.repeated, "missing": audit.missing, "not due": audit.stray}
    return ", ".join(f"{readable_count(n)} {what}" for what, n in counts.items() if n or zeros)


def left_out(run: RunFolder) -> dict[str, int]:
    """Samples of committed steps that nobody trained on: they could not be read, or their
    participants were away."""
    away = away_in(run)
    samples = int((away["stop"] - away["first"]).sum())
    return {"skipped_samples": len(run.skipped), "away_samples": samples}


def away_in(run: RunFolder) -> Records:
    """Records of participants that a committed round was without, as their host was lost."""
    records: Records = run.committed[run.committed["kind"] == Kind.AWAY]
    return records


def left_out_words(summary: dict[str, Any]) -> str:
    """How many of the samples of a run were not trained on, as the end of a sentence."""
    unread, away = summary["skipped_samples"], summary.get("away_samples")
    text = f", {readable_count(unread)} of them skipped as unreadable" if unread else ""
    several = f"{readable_count(away)} of them passed over as their host was lost" if away else ""
    return f"{text}, {several}" if several else text


def prove(run: RunFolder) -> Proof:
    """Check everything that a run has committed by now; writes nothing."""
    file = run.path / "ledger.bin"
    size = file.stat().st_size if file.is_file() else 0
    samples = run.plan.epoch_samples
    wrong: Iterable[int] = ()
    if run.plan.own_rounds is not None:
        wrong = not_their_own(run.committed, run.plan.own_rounds, run.last_step)
    elif samples:
        wrong = untiled(run.committed, run.plan.batches, run.last_step)
    return Proof(
        run=run,
        torn_bytes=(size - LEDGER_START) % LEDGER.itemsize if size > LEDGER_START else 0,
        untiled=tuple(int(step) for step in wrong),
    )


def untiled(
    ledger: Records, batches: Batches, last_step: int, first_step: int = 1
) -> NDArray[np.int64]:
    """Steps whose records are not exactly the positions of their global batch, in order.

    The shares of a step may be cut anywhere and come in any order; sorted, they must begin
    where its global batch begins, follow each other without gap or overlap, end where it
    ends, and be of its epoch.

    Args:
        ledger: [records] of `events.LEDGER`; empty shares are allowed.
        batches: what each step takes.
        last_step: the last committed step, from 1.
        first_step: where to begin, if the steps before it are known to be right.

    Returns:
        [any] steps. Those up to `last_step` that have no record are among them.
    """
    real = ledger[ledger["stop"] != ledger["first"]]
    real = real[np.lexsort((real["first"], real["step"]))]
    step = real["step"]
    strange = step[(step < first_step) | (step > last_step)]
    real = real[(step >= first_step) & (step <= last_step)]
    step, first, stop = real["step"], real["first"], real["stop"]
    due = batches.table(first_step, last_step)
    epoch, begin, end = due[step - first_step].T
    changes = step[1:] != step[:-1]
    opens, closes = np.append(True, changes)[: len(step)], np.append(changes, True)[: len(step)]
    joins = first == np.where(opens, begin, np.append(0, stop[:-1])[: len(step)])
    good = joins & (real["epoch"] == epoch) & (~closes | (stop == end))
    filled = first_step + np.flatnonzero(due[:, 2] > due[:, 1])
    absent = np.setdiff1d(filled, step)
    return np.unique(np.concatenate([step[~good], absent, strange])).astype(np.int64)


def not_their_own(ledger: Records, own: OwnRounds, last_step: int) -> NDArray[np.int64]:
    """Rounds whose records are not exactly what its participants take of data of their own.

    Args:
        ledger: [records] of `events.LEDGER`; empty shares are allowed.
        own: what participants take.
        last_step: the last committed round, from 1.

    Returns:
        [any] rounds. Those up to `last_step` that have no record are among them.
    """
    due = [(step, *part) for step in range(1, last_step + 1) for part in own.of(step)]
    real = ledger[ledger["stop"] != ledger["first"]]
    found = np.stack([real[name] for name in ("step", "epoch", "first", "stop")], axis=1)
    rows = np.concatenate([np.array(due, np.int64).reshape(-1, 4), found.astype(np.int64)])
    unique, where = np.unique(rows, axis=0, return_inverse=True)
    sign = np.where(np.arange(len(rows)) < len(due), 1, -1)
    return np.unique(unique[np.bincount(where.reshape(-1), weights=sign) != 0, 0])


def _faulty_epoch(epoch: EpochAudit) -> str:
    words = fault_counts(epoch, zeros=False)
    due, used = readable_count(epoch.expected), readable_count(epoch.used)
    where = ", ".join(map(_place, epoch.faults))
    whose = f"participant {epoch.participant}, " if epoch.participant is not None else ""
    return (
        f"fault   {whose}epoch {epoch.epoch + 1}: {due} due, {used} used: {words}; first at {where}"
    )


def _place(fault: Stretch) -> str:
    what = "not due" if fault.what == "stray" else fault.what
    if fault.stop - fault.first == 1:
        return f"position {fault.first} ({what})"
    return f"positions {fault.first} to {fault.stop - 1} ({what})"


def of_privacy(run: RunFolder, training_s: float) -> dict[str, Any]:
    """The figures of a summary that are others in a private run.

    Args:
        run: that is summed up.
        training_s: seconds of its training.
    """
    return privacy_figures(run.spec, run.path, id_of(run.path), run.last_step, training_s)


def prove_private(run: RunFolder) -> PrivacyProof:
    """Compare the records of a private run with its secret; writes nothing.

    Raises:
        RunError: it is not a private run, or began with a version that wrote no figures.
        SpecError: the secret is not on this machine.
    """
    spec = run.spec.privacy
    if not spec.on or not spec.accounted:
        raise RunError(
            f"{run.path} is not a private run: its job has no [privacy], or epsilon was not "
            "computed when it began. Leave --privacy out."
        )
    return prove_privacy(run.path, id_of(run.path), run.spec, run.committed, run.last_step)
