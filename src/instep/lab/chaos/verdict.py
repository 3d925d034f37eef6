"""Did a run that was broken on purpose end as if nothing had happened? `instep chaos`.

A pure function of two run folders and of what was broken when; `chaos.py` does the
breaking. What must hold: the run completed, with the bits of the undisturbed run, each
sample was used once, and after each injection all workers committed a step again.
Way in: `judge`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from instep.events import STEPS, read_records
from instep.lab.comparison import agree
from instep.report.figures.proof import Proof, fault_counts, prove
from instep.report.figures.recovery import computed_twice, quantiles, recoveries
from instep.report.figures.summary import finite, loss_per_step
from instep.store.run_folder import RunFolder
from instep.units import readable_count, readable_seconds
from instep.words import command, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One thing that was broken, or could not be."""

    kind: str
    """`kill`, `hang`, or `partition`."""
    role: str
    """Of the process; `network` for a partition."""
    number: int = -1
    """Of the worker, the host, or the worker that the loader process belongs to."""
    pid: int = 0
    step: int = 0
    """The last committed step at that time."""
    time: float = math.nan
    """Unix seconds; NaN if it was not done."""
    released: bool = False
    """Of a hang: the run did not notice it, so `instep chaos` ended it."""
    hosts: tuple[int, ...] = ()
    """Of a partition: the hosts cut off from the others and from the master."""
    missed: str = ""
    """Why it could not be done; empty if it was."""


@dataclass(frozen=True, slots=True)
class Fall:
    """The ledger ended at an earlier step than before: some steps are computed again."""

    time: float
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a run that was broken on purpose."""

    run: RunFolder
    undisturbed: RunFolder | None
    """The run that it is compared with, if there is one."""

    going_on: bool
    """Whether the run continues after the injections; then it is judged as far as it got."""

    injected: tuple[Injected, ...]
    recovery_s: tuple[float, ...]
    """For each injection that was made, until all workers had committed a step; or NaN."""

    losses: int
    """Steps whose losses were compared."""

    other_loss: tuple[int, float, float] | None
    """The first step with another loss: undisturbed, disturbed."""

    proof: Proof
    twice: tuple[int, ...]
    """Steps computed again after a worker or the ledger had recorded them as committed."""

    gone_back: tuple[int, ...]
    """Of these, the steps discarded when no worker was left and the run used a checkpoint."""

    deepest: int
    """Most steps lost at once without going back to a checkpoint."""

    left: tuple[int, ...]
    """Pids that outlived the run."""

    stuck_s: float
    """Above 0: the run was given up after so long without a step."""

    @property
    def bits(self) -> bool:
        """Whether the run promises the same bits; else losses agree to `TOLERANCE`."""
        return self.run.spec.train.determinism == "bits"

    @property
    def timed(self) -> bool:
        """Whether the result depends on timing, so that no two runs have the same losses."""
        return self.run.spec.sync.leased

    @property
    def done(self) -> list[Injected]:
        """What was broken."""
        return [each for each in self.injected if not each.missed]

    @property
    def faults(self) -> list[str]:
        """What does not hold, a sentence each without its full stop."""
        return [*self._of_the_end(), *self._of_the_result(), *self._of_the_injections()]

    def _of_the_end(self) -> Iterator[str]:
        if not self.going_on and not self._well:
            cause = str(self.run.last("worker_failed").get("cause") or "")
            why = f": {cause.rstrip('.')}" if cause else ""
            yield f"the run ended at step {self.run.last_step} ({self.run.outcome}){why}"
        if self.stuck_s:
            yield f"no step was committed for {readable_seconds(self.stuck_s)}, so it was given up"
        if self.left:
            yield f"processes outlived the run: {', '.join(map(str, self.left))}"

    @property
    def _well(self) -> bool:
        return self.run.outcome in ("completed", "stopped")

    def _of_the_result(self) -> Iterator[str]:
        found, wanted = _sha256(self.run), _sha256(self.undisturbed)
        if self.bits and self.undisturbed and found != wanted:
            mine, theirs = str(found)[:12], str(wanted)[:12]
            yield f"the parameters have the SHA-256 {mine}..., and undisturbed {theirs}..."
        if self.other_loss:
            step, loss, mine_ = self.other_loss
            yield f"the loss of step {step} is {mine_!r}, and undisturbed {loss!r}"
        if not self.proof.exact:
            yield self.proof.fault.rstrip(".")
        elif self.undisturbed and self.undisturbed.audit.sha256 != self.proof.audit.sha256:
            yield "it used other samples than the undisturbed run"
        if self.deepest > 1:
            yield f"{self.deepest} committed steps were lost at once without going to a checkpoint"

    def _of_the_injections(self) -> Iterator[str]:
        missed = [each.missed for each in self.injected if each.missed]
        if missed:
            count, total = len(missed), len(self.injected)
            yield f"{count} of {total} injections could not be made: {missed[0]}"
        released = sum(each.released for each in self.injected)
        if released:
            yield f"{plural(released, 'hang')} not noticed by the run, and ended by instep chaos"
        still = sum(math.isnan(seconds) for seconds in self.recovery_s)
        if still and (self.going_on or not self._well):
            team = self.run.members.team
            yield f"after {still} injections no step of all {team} workers followed"

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def recovery_of(self, role: str, kind: str = "kill") -> dict[str, float]:
        """`median`, `p90`, `p99`, `worst` seconds for one kind of injection into one role."""
        both = zip(self.done, self.recovery_s, strict=True)
        return quantiles(
            np.array([s for each, s in both if (each.role, each.kind) == (role, kind)])
        )

    @property
    def _sorts(self) -> list[tuple[str, str]]:
        """(kind, role) of what was broken, each once, in order."""
        return sorted({(each.kind, each.role) for each in self.done})

    def as_table(self) -> dict[str, Any]:
        """The verdict as plain data, for JSON; None for what is not known."""
        seconds, audit = iter(self.recovery_s), self.proof.audit
        table = {
            "run": str(self.run.path),
            "undisturbed": str(self.undisturbed.path) if self.undisturbed else None,
            "holds": self.holds,
            "faults": self.faults,
            "outcome": self.run.outcome,
            "steps": self.run.last_step,
            "workers": self.run.members.team,
            "determinism": self.run.spec.train.determinism,
            "injections": len(self.injected),
            "injected": len(self.done),
            "parameters_sha256": _sha256(self.run),
            "undisturbed_parameters_sha256": _sha256(self.undisturbed),
            "losses_compared": self.losses,
            "samples": audit.used,
            "repeated_samples": audit.repeated + audit.stray,
            "missing_samples": audit.missing,
            "samples_sha256": audit.sha256,
            "steps_done_twice": len(self.twice),
            "of_these_gone_back": len(self.gone_back),
            "recovery_s": {
                f"{kind} {role}": self.recovery_of(role, kind) for kind, role in self._sorts
            },
            "each": [
                {**asdict(each), "recovery_s": None if each.missed else next(seconds)}
                for each in self.injected
            ],
        }
        cleaned: dict[str, Any] = finite(table)
        return cleaned

    def lines(self) -> Iterator[str]:
        """The verdict for a person; the last line is the next command."""
        counted = Counter(f"{each.kind} {each.role}" for each in self.done)
        sorts = ", ".join(f"{sort} {count}" for sort, count in sorted(counted.items()))
        yield f"broken  {len(self.done)} of {len(self.injected)} times" + (sorts and f": {sorts}")
        steps = plural(self.run.last_step, "step")
        yield f"run     {self.run.path}: {self.run.outcome}, {steps}"
        yield from self._result_lines()
        audit = self.proof.audit
        yield f"samples {readable_count(audit.used)} used, {fault_counts(audit)}"
        back = len(self.gone_back)
        more = f", {back} of them after going back to a checkpoint" if back else ""
        again = plural(len(self.twice), "step")
        yield f"twice   {again} computed again that a worker had already committed{more}"
        for kind, role in self._sorts:
            found = self.recovery_of(role, kind)
            shown = ", ".join(f"{name} {readable_seconds(s)}" for name, s in found.items())
            yield f"paused  {kind} {role}: {shown or 'no step of all workers followed'}"
        yield from (f"fault   {fault}" for fault in self.faults)
        yield f"verdict {self._conclusion()}"
        yield f"next    {self._next()}"

    def _result_lines(self) -> Iterator[str]:
        sha256 = str(_sha256(self.run))
        if self.undisturbed is None:
            why = "the run has not ended" if self.going_on else "there is no other run"
            why += "; a step of it can be replayed" if self.bits else ""
            yield f"hash    nothing to compare with: {why}"
            return
        if self.timed:
            yield f"hash    {sha256[:12]}, not compared, nor are losses: they depend on timing"
            return
        if not self.bits:
            yield f"hash    {sha256[:12]}, not compared: determinism = 'order' allows other bits"
        elif sha256 == str(_sha256(self.undisturbed)):
            yield f"hash    {sha256}: the same as undisturbed"
        if self.other_loss is None:
            how = "the same bits as undisturbed" if self.bits else "the same to rounding"
            yield f"losses  of {plural(self.losses, 'step')}: {how}"

    def _conclusion(self) -> str:
        if not self.holds:
            return "does not hold"
        if self.undisturbed is None:
            return "holds, as far as can be said without an undisturbed run"
        if self.timed:
            return "holds: the same samples as undisturbed; the result depends on timing"
        return "holds: the same result as undisturbed" if self.bits else "holds, to rounding"

    def _next(self) -> str:
        run = self.run.path
        if self.undisturbed is not None:
            return command("report", run, str(self.undisturbed.path))
        if self.bits and self.run.last_step:
            return command("replay", run, f"--step {self.run.last_step}")
        return command("report", run)


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
        run: that run, ended or not.
        undisturbed: another run of the same job that was left alone, or None.
        injected: what was broken, in the order of time.
        falls: of its ledger, as they were seen.
        going_on: whether it has not ended, and need not have.
        left: pids of it that lived on after its end.
        stuck_s: above 0 if it was given up after so long without a step.
    """
    raw = read_records(run.path / "steps.bin", STEPS)
    raw = raw[~np.isin(raw["worker"], [*run.members.servers])]
    formed = [float(e["time"]) for e in run.members.generations]
    moments = [each.time for each in injected if not each.missed]
    back = [int(e["resumed_step"]) for e in run.named("went_back")]
    intended = {*back, *(e["clean_step"] for e in run.named("corruption_found"))}
    leased = run.spec.sync.leased  # steps overlap there: only the whole ledger can tell
    falls = () if leased else falls
    lost = {f: set(range(f.after + 1, f.before + 1)) for f in falls}
    full = np.array([_members_at(run, moment) for moment in moments])
    recovery_s = np.full(len(moments), np.nan)
    for workers in np.unique(full):
        then = np.flatnonzero(full == workers)
        recovery_s[then] = recoveries(raw, formed, [moments[n] for n in then], int(workers))
    count, other = _losses(run, undisturbed) if undisturbed and not leased else (0, None)
    again = set() if leased else computed_twice(raw, formed)
    return Verdict(
        run=run,
        undisturbed=undisturbed,
        going_on=going_on,
        injected=tuple(injected),
        recovery_s=tuple(recovery_s.tolist()),
        losses=count,
        other_loss=other,
        proof=prove(run),
        twice=tuple(sorted(again.union(*lost.values()))),
        gone_back=tuple(sorted(set().union(*(s for f, s in lost.items() if f.after in back)))),
        deepest=max((len(s) for f, s in lost.items() if f.after not in intended), default=0),
        left=tuple(left),
        stuck_s=stuck_s,
    )


def _members_at(run: RunFolder, moment: float) -> int:
    """How many workers the run had then; it may have grown or shrunk."""
    before = [e for e in run.members.generations if float(e["time"]) <= moment]
    return len({*before[-1]["members"]} - run.members.servers) if before else run.spec.workers


def _sha256(run: RunFolder | None) -> str | None:
    return run.last("model_saved").get("parameters_sha256") if run else None


def _losses(run: RunFolder, undisturbed: RunFolder) -> tuple[int, tuple[int, float, float] | None]:
    """In how many steps the losses were compared, and the first where they differ."""
    (steps, found), (wanted_steps, wanted) = (loss_per_step(each) for each in (run, undisturbed))
    both, mine, theirs = np.intersect1d(steps, wanted_steps, return_indices=True)
    one, other = found[mine], wanted[theirs]
    bits = run.spec.train.determinism == "bits"
    differs = np.flatnonzero(~agree(one, other, bits=bits))
    if not len(differs):
        return len(both), None
    at = differs[0]
    return len(both), (int(both[at]), float(other[at]), float(one[at]))
