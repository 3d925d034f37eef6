"""Answers of `instep audit RUN --privacy`: do a run's records agree with its secret?

With the secret it is known which samples each step was to have. The ledger says which places the
committed steps took, `releases.bin` what was published, and `job.toml` which epsilon is claimed.
Nothing here shows that the workers added the noise: `instep lab privacy` attacks the step itself.
Way in: `prove_privacy`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instep.job.spec import JobSpec
from instep.privacy import secret_files
from instep.privacy.accounting import SampledSteps, bounds
from instep.privacy.released import ReleaseRecords, read_released, secret_tag
from instep.privacy.sampling import NOTHING, SAMPLINGS
from instep.privacy.units import Units
from instep.words import plural, ranges

Ledger = np.ndarray[Any, Any]

_NEAR = 1e-3
"""How far two computations of epsilon may be apart, relative to it."""


@dataclass(frozen=True, kw_only=True)
class PrivacyProof:
    """Records of a private run, and whether that agrees with its secret."""

    steps: int
    """Committed."""
    faults: tuple[str, ...]
    """Sentences; none where all agrees."""
    samples: int
    protects: str
    units: int
    """Samples or participants, as protected."""
    epsilon: float
    """Computed anew."""
    claimed: float
    released: int
    """Contents that were published, of all commits."""

    @property
    def exact(self) -> bool:
        """Whether everything agrees."""
        return not self.faults

    @property
    def fault(self) -> str:
        """Everything that does not agree, in one sentence."""
        return f"the records of the private run are not as they must be: {'; '.join(self.faults)}."

    def as_table(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"exact": self.exact, **asdict(self)}

    def lines(self) -> list[str]:
        """Everything for a person."""
        found = [f"fault   {each}" for each in self.faults]
        if self.exact:
            found += [
                f"private {plural(self.steps, 'step')}: each of {self.units:,} {self.protects}s in "
                "the steps that the secret draws, and one content published for each",
                f"epsilon {self.epsilon:.4g} computed anew, {self.claimed:.4g} claimed",
            ]
        return found


def prove_privacy(
    run: Path, run_id: str, job: JobSpec, ledger: Ledger, last_step: int
) -> PrivacyProof:
    """Compare the records of a run with its secret; only reads.

    Args:
        run: its folder.
        run_id: names the file of the secret.
        job: with what was accounted.
        ledger: records of committed steps.
        last_step: the last of them.

    Raises:
        SpecError: the secret is not here, or a library is missing.
    """
    secret, released = secret_files.load(run_id), read_released(run, run_id)
    spec, known = job.privacy, job.privacy.accounted
    units = Units.of_job(job, int(known["samples"]))
    plan = SampledSteps(spec.sampling, units.in_epoch, int(known["steps"]))
    faults = [*_of_secret(run, run_id, secret, released.secret)]
    faults += _of_releases(released, last_step)
    faults += _of_units(ledger, job, units, secret, last_step)
    if (last := max(last_step, *released.known, 0)) > plan.steps:
        faults.append(f"{last} steps were published, and epsilon is of {plan.steps}")
    found = bounds(plan, spec.noise or 0.0, spec.delta or 0.0)
    pairs = (found.upper, known["epsilon"]), (found.lower, known["epsilon_lower"])
    if any(abs(one - other) > _NEAR * one for one, other in pairs):
        faults.append(
            f"epsilon is {found.upper:.4g} (not below {found.lower:.4g}) for the noise, the batch "
            f"and the steps of the job, and {known['epsilon']:.4g} is claimed"
        )
    return PrivacyProof(
        steps=last_step,
        faults=tuple(faults),
        samples=int(known["samples"]),
        protects=spec.protects,
        units=units.number,
        epsilon=found.upper,
        claimed=known["epsilon"],
        released=sum(released.known.values()),
    )


def _of_secret(run: Path, run_id: str, secret: bytes, known: bytes | None) -> Iterator[str]:
    file = secret_files.folder() / run_id
    if known is None:
        yield "releases.bin does not say which secret the run has"
    elif known != secret_tag(secret):
        yield "the secret that is here is not that of the run"
    if file.stat().st_mode & 0o077:
        yield f"others may read {file}"
    if leaks := [each.name for each in _files(run) if _holds(each, secret)]:
        yield f"the secret is in the folder of the run ({', '.join(leaks)})"


def _files(run: Path) -> Iterable[Path]:
    return (each for each in sorted(run.rglob("*")) if each.is_file() and each.stat().st_size)


def _holds(path: Path, secret: bytes) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(data.find(each) >= 0 for each in (secret, secret.hex().encode()))


def _of_releases(released: ReleaseRecords, last_step: int) -> Iterator[str]:
    own, known = released.own, released.known  # this folder must have each step of its own
    if missing := [step for step in range(1, last_step + 1) if step not in own]:
        yield f"step {ranges(missing, 20)}: committed, and no release is recorded"
    if twice := sorted(commit for commit, count in known.items() if count > 1):
        yield f"step {ranges(twice, 20)}: published with more than one content"


def _of_units(
    ledger: Ledger, job: JobSpec, units: Units, secret: bytes, last_step: int
) -> Iterator[str]:
    """Compare the units at the places that the ledger has with those that the secret draws."""
    drawn, what, (count, size, each) = job.privacy.sampling, job.privacy.protects, units
    sampling, wrong = SAMPLINGS[drawn](count, size, secret), set[int]()
    ordered = ledger[np.argsort(ledger["step"], kind="stable")]
    steps, begins = np.unique(ordered["step"], return_index=True)
    pieces = np.split(ordered, begins[1:]) if len(steps) else []
    records = dict(zip(steps.tolist(), pieces, strict=True))
    for epoch in range(-(-last_step // sampling.steps)):
        uses = np.zeros(count, np.int64)
        first = epoch * sampling.steps
        stop = min(first + sampling.steps, last_step)
        for step in range(first + 1, stop + 1):
            due, taken = np.zeros(count, np.int64), np.zeros(count, np.int64)
            due[sampling.of_step(epoch, step - first - 1)] = 1
            for record in records.get(step, ()):
                low, high = int(record["first"]), int(record["stop"])
                within = 0 <= low <= high <= sampling.positions * each
                if int(record["epoch"]) != epoch or not within or low % each or high % each:
                    wrong.add(step)
                    continue
                some = sampling.indices(epoch, low // each, high // each)
                np.add.at(taken, some[some != NOTHING], 1)
            uses += taken
            if not np.array_equal(due, taken):
                wrong.add(step)
        once = uses == 1 if stop - first == sampling.steps else uses <= 1
        if drawn == "allocation" and not once.all():
            yield f"epoch {epoch + 1}: {int((~once).sum()):,} {what}s not in exactly one step"
    if wrong:
        yield f"step {ranges(sorted(wrong), 20)}: other {what}s than the secret draws"
