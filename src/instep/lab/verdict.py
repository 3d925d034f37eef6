"""Does a run that was broken on purpose end as if nothing had been: the answer of `instep chaos`.

A pure function of two run folders and of what was broken when. The breaking is
`lab/chaos.py`'s. What must hold: the run came to its end, with the bits of the
undisturbed one, each sample once, and after each injection all workers committed
a step again. Way in: `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instep.events import STEPS, read_records
from instep.lab.replayed import TOLERANCE
from instep.report.figures.proof import Proof, prove
from instep.report.figures.recovery import computed_twice, quantiles, recoveries
from instep.report.figures.summary import finite, loss_per_step
from instep.store.run_folder import Floats, RunFolder
from instep.units import readable_seconds
from instep.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One thing that was broken, or was to be."""

    kind: str
    """`kill`, `hang`, or `partition`."""
    role: str
    """Of the process; `network` for a partition."""
    number: int = -1
    """Of the worker, the host, or the worker whose loader process it was."""
    pid: int = 0
    step: int = 0
    """The last that was committed then."""
    time: float = math.nan
    """Unix seconds; NaN where it was not done."""
    released: bool = False
    """Of a hang: nobody noticed it, so it was ended by whoever began it."""
    hosts: tuple[int, ...] = ()
    """Of a partition: those cut off from the others and from the master."""
    missed: str = ""
    """Why it could not be done; empty if it was."""


@dataclass(frozen=True, slots=True)
class Fall:
    """The ledger was seen to end at an earlier step than before: some are computed again."""

    time: float
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a run that was broken on purpose."""

    run: Path
    outcome: str
    cause: str
    """Of a run that failed."""

    steps: int
    workers: int
    bits: bool
    undisturbed: Path | None
    """The run that it is compared with; None where there is none."""

    going_on: bool
    """Whether the run goes on after the breaking; then it is judged as far as it got."""

    injected: tuple[Injected, ...]
    recovery_s: tuple[float, ...]
    """Of each injection, until all workers had committed a step; NaN where none followed."""

    parameters_sha256: str | None
    wanted_sha256: str | None
    losses: int
    """Steps whose losses were compared."""

    other_loss: tuple[int, float, float] | None
    """The first step with another loss: undisturbed, disturbed."""

    proof: Proof
    wanted_samples: str | None
    """Of the undisturbed run's samples, as the audit hashes them."""

    twice: tuple[int, ...]
    """Steps computed again after a worker had recorded them as committed, or the ledger had."""

    gone_back: tuple[int, ...]
    """Of these, those that the run took back when nobody was left and it went to a checkpoint."""

    deepest: int
    """Steps lost at once where it did not go back to a checkpoint."""

    left: tuple[int, ...]
    """Processes that outlived the run."""

    stuck_s: float
    """Above 0: it was given up after so long without a step."""

    @property
    def done(self) -> list[Injected]:
        """What was broken."""
        return [each for each in self.injected if not each.missed]

    @property
    def missed(self) -> list[Injected]:
        """What was to be broken and could not be."""
        return [each for each in self.injected if each.missed]

    @property
    def faults(self) -> list[str]:
        """What does not hold, a sentence each without its full stop."""
        return [
            *self._of_the_end(),
            *self._of_the_result(),
            *self._of_the_samples(),
            *self._of_the_breaking(),
        ]

    def _of_the_end(self) -> Iterator[str]:
        if not self.going_on and self.outcome not in ("completed", "stopped"):
            why = f": {self.cause.rstrip('.')}" if self.cause else ""
            yield f"the run ended at step {self.steps} ({self.outcome}){why}"
        if self.stuck_s:
            yield f"no step was committed for {readable_seconds(self.stuck_s)}, so it was given up"
        if self.left:
            yield f"processes outlived the run: {', '.join(map(str, self.left))}"

    def _of_the_result(self) -> Iterator[str]:
        if self.bits and self.undisturbed and self.parameters_sha256 != self.wanted_sha256:
            mine, theirs = (str(each)[:12] for each in (self.parameters_sha256, self.wanted_sha256))
            yield f"the parameters have the SHA-256 {mine}..., and undisturbed {theirs}..."
        if self.other_loss:
            step, wanted, found = self.other_loss
            yield f"the loss of step {step} is {found!r}, and undisturbed {wanted!r}"

    def _of_the_samples(self) -> Iterator[str]:
        if not self.proof.exact:
            yield self.proof.fault.rstrip(".")
        elif self.wanted_samples not in (None, self.proof.audit.sha256):
            yield "it used other samples than the undisturbed run"
        if self.deepest > 1:
            yield f"{self.deepest} committed steps were lost at once without going to a checkpoint"

    def _of_the_breaking(self) -> Iterator[str]:
        if self.missed:
            count, total = len(self.missed), len(self.injected)
            yield f"{count} of {total} injections could not be made: {self.missed[0].missed}"
        released = sum(each.released for each in self.injected)
        if released:
            yield f"{plural(released, 'hang')} not noticed, and ended from outside"
        still = sum(math.isnan(seconds) for seconds in self.recovery_s)
        if still and (self.going_on or self.outcome not in ("completed", "stopped")):
            yield f"after {still} injections no step of all {self.workers} workers followed"

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def recovery_of(self, role: str, kind: str = "kill") -> dict[str, float]:
        """`median`, `p90`, `p99`, `worst` seconds of one sort of injection."""
        both = zip(self.done, self.recovery_s, strict=True)
        return quantiles(
            np.array([s for each, s in both if (each.role, each.kind) == (role, kind)])
        )

    @property
    def sorts(self) -> list[tuple[str, str]]:
        """(kind, role) of what was broken, each once, in order."""
        return sorted({(each.kind, each.role) for each in self.done})

    def as_table(self) -> dict[str, Any]:
        """All of it as plain data, for JSON; what is not known is None."""
        seconds = iter(self.recovery_s)
        injections = [
            {**asdict(each), "recovery_s": None if each.missed else next(seconds)}
            for each in self.injected
        ]
        table = {
            "run": str(self.run),
            "undisturbed": str(self.undisturbed) if self.undisturbed else None,
            "holds": self.holds,
            "faults": self.faults,
            "outcome": self.outcome,
            "steps": self.steps,
            "workers": self.workers,
            "determinism": "bits" if self.bits else "order",
            "injections": len(self.injected),
            "injected": len(self.done),
            "parameters_sha256": self.parameters_sha256,
            "undisturbed_parameters_sha256": self.wanted_sha256,
            "losses_compared": self.losses,
            "samples": self.proof.audit.used,
            "repeated_samples": self.proof.audit.repeated + self.proof.audit.stray,
            "missing_samples": self.proof.audit.missing,
            "samples_sha256": self.proof.audit.sha256,
            "steps_done_twice": len(self.twice),
            "of_these_gone_back": len(self.gone_back),
            "recovery_s": {
                f"{kind} {role}": self.recovery_of(role, kind) for kind, role in self.sorts
            },
            "each": injections,
        }
        cleaned: dict[str, Any] = finite(table)
        return cleaned


def judge(
    run: RunFolder,
    undisturbed: RunFolder | None,
    injected: Sequence[Injected],
    falls: Sequence[Fall] = (),
    *,
    going_on: bool = False,
    left: Sequence[int] = (),
    stuck_s: float = 0.0,
) -> Verdict:
    """Judge a run that was broken.

    Args:
        run: that run, ended or going on.
        undisturbed: another of the same job that was left alone, or None.
        injected: what was broken, in the order of time.
        falls: of its ledger, as they were seen.
        going_on: whether it has not ended, and need not have.
        left: processes of it that lived on after its end.
        stuck_s: above 0 if it was given up after so long without a step.
    """
    bits = run.spec.train.determinism == "bits"
    raw = read_records(run.path / "steps.bin", STEPS)
    formed = [float(e["time"]) for e in run.generations]
    moments = [each.time for each in injected if not each.missed]
    back = [int(e["resumed_step"]) for e in run.named("went_back")]
    meant = {*back, *(e["clean_step"] for e in run.named("corruption_found"))}
    gone_back = {
        step for f in falls if f.after in back for step in range(f.after + 1, f.before + 1)
    }
    lost = {step for f in falls for step in range(f.after + 1, f.before + 1)}
    full = np.array([_members_at(run, moment) for moment in moments])
    stood = np.full(len(moments), np.nan)
    for workers in np.unique(full):
        then = np.flatnonzero(full == workers)
        stood[then] = recoveries(raw, formed, [moments[n] for n in then], int(workers))
    count, other = _losses(run, undisturbed, bits=bits) if undisturbed else (0, None)
    return Verdict(
        run=run.path,
        outcome=run.outcome,
        cause=str(run.last("worker_failed").get("cause") or ""),
        steps=run.last_step,
        workers=run.team,
        bits=bits,
        undisturbed=undisturbed.path if undisturbed else None,
        going_on=going_on,
        injected=tuple(injected),
        recovery_s=tuple(stood.tolist()),
        parameters_sha256=_sha256(run),
        wanted_sha256=_sha256(undisturbed) if undisturbed else None,
        losses=count,
        other_loss=other,
        proof=prove(run),
        wanted_samples=undisturbed.audit.sha256 if undisturbed else None,
        twice=tuple(sorted(lost | computed_twice(raw, formed))),
        gone_back=tuple(sorted(gone_back)),
        deepest=max((f.before - f.after for f in falls if f.after not in meant), default=0),
        left=tuple(left),
        stuck_s=stuck_s,
    )


def _members_at(run: RunFolder, moment: float) -> int:
    """How many workers the run had then; it may have grown or shrunk."""
    before = [e for e in run.generations if float(e["time"]) <= moment]
    return len(before[-1]["members"]) if before else run.spec.workers


def _sha256(run: RunFolder) -> str | None:
    return run.last("model_saved").get("parameters_sha256")


def _losses(
    run: RunFolder, undisturbed: RunFolder, *, bits: bool
) -> tuple[int, tuple[int, float, float] | None]:
    """In how many steps the losses were compared, and the first where they differ."""
    (steps, found), (wanted_steps, wanted) = (loss_per_step(each) for each in (run, undisturbed))
    both, mine, theirs = np.intersect1d(steps, wanted_steps, return_indices=True)
    one, other = found[mine], wanted[theirs]
    differs = np.flatnonzero(~_agree(one, other, bits=bits))
    if not len(differs):
        return len(both), None
    at = differs[0]
    return len(both), (int(both[at]), float(other[at]), float(one[at]))


def _agree(one: Floats, other: Floats, *, bits: bool) -> Any:
    if not bits:
        return np.isclose(one, other, rtol=TOLERANCE, atol=0.0, equal_nan=True)
    same = one.astype("<f8").view("<i8") == other.astype("<f8").view("<i8")
    return same | (np.isnan(one) & np.isnan(other))
