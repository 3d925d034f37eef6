"""Answers of `instep audit RUN --privacy`: do a run's records agree with its secret?

With the secret it is known which samples each step was to have. The ledger says which places the
committed steps took, `releases.bin` what was published, and `job.toml` which epsilon is claimed.
Nothing here shows that the workers added the noise: `instep lab privacy` attacks the step itself.
Way in: `prove_privacy`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instep.job.privacy import PrivacySpec
from instep.privacy import secret_files
from instep.privacy.accounting import SampledSteps, bounds
from instep.privacy.released import contents_by_commit, secret_tag, secret_tag_in
from instep.privacy.sampling import NOTHING, SAMPLINGS
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
                f"private {plural(self.steps, 'step')}: each of {self.samples:,} samples in the "
                "steps that the secret draws, and one content published for each",
                f"epsilon {self.epsilon:.4g} computed anew, {self.claimed:.4g} claimed",
            ]
        return found


def prove_privacy(
    run: Path, run_id: str, spec: PrivacySpec, batch: int, ledger: Ledger, last_step: int
) -> PrivacyProof:
    """Compare the records of a run with its secret; only reads.

    Args:
        run: its folder.
        run_id: names the file of the secret.
        spec: of its job, with what was accounted.
        batch: `train.global_batch`.
        ledger: records of committed steps.
        last_step: the last of them.

    Raises:
        SpecError: the secret is not here, or a library is missing.
    """
    secret, contents = secret_files.load(run_id), contents_by_commit(run)
    known, samples = spec.accounted, int(spec.accounted["samples"])
    plan = SampledSteps(spec.sampling, SAMPLINGS[spec.sampling].steps_of(samples, batch), 0)
    plan = plan._replace(steps=int(known["steps"]))
    faults = [*_of_secret(run, run_id, secret), *_of_releases(contents, last_step)]
    faults += _of_samples(ledger, spec, samples, batch, secret, last_step)
    if (last := max(last_step, *contents, 0)) > plan.steps:
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
        samples=samples,
        epsilon=found.upper,
        claimed=known["epsilon"],
        released=sum(contents.values()),
    )


def _of_secret(run: Path, run_id: str, secret: bytes) -> Iterator[str]:
    known, file = secret_tag_in(run), secret_files.folder() / run_id
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


def _of_releases(contents: Mapping[int, int], last_step: int) -> Iterator[str]:
    if missing := [step for step in range(1, last_step + 1) if step not in contents]:
        yield f"step {ranges(missing, 20)}: committed, and no release is recorded"
    if twice := sorted(commit for commit, count in contents.items() if count > 1):
        yield f"step {ranges(twice, 20)}: published with more than one content"


def _of_samples(
    ledger: Ledger, spec: PrivacySpec, samples: int, batch: int, secret: bytes, last_step: int
) -> Iterator[str]:
    """Compare the samples at the places that the ledger has with those that the secret draws."""
    sampling, wrong = SAMPLINGS[spec.sampling](samples, batch, secret), set[int]()
    ordered = ledger[np.argsort(ledger["step"], kind="stable")]
    steps, begins = np.unique(ordered["step"], return_index=True)
    pieces = np.split(ordered, begins[1:]) if len(steps) else []
    records = dict(zip(steps.tolist(), pieces, strict=True))
    for epoch in range(-(-last_step // sampling.steps)):
        uses = np.zeros(samples, np.int64)
        first = epoch * sampling.steps
        stop = min(first + sampling.steps, last_step)
        for step in range(first + 1, stop + 1):
            due, taken = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
            due[sampling.of_step(epoch, step - first - 1)] = 1
            for record in records.get(step, ()):
                low, high = int(record["first"]), int(record["stop"])
                if int(record["epoch"]) != epoch or not 0 <= low <= high <= sampling.positions:
                    wrong.add(step)
                    continue
                some = sampling.indices(epoch, low, high)
                np.add.at(taken, some[some != NOTHING], 1)
            uses += taken
            if not np.array_equal(due, taken):
                wrong.add(step)
        once = uses == 1 if stop - first == sampling.steps else uses <= 1
        if spec.sampling == "allocation" and not once.all():
            yield f"epoch {epoch + 1}: {int((~once).sum()):,} samples not in exactly one step"
    if wrong:
        yield f"step {ranges(sorted(wrong), 20)}: other samples than the secret draws"
