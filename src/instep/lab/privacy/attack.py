"""`instep lab privacy`: attacks the private step of a job, and tests the claims it rests on.

The attack gives a lower bound of epsilon, with its confidence, beside the claimed upper one.
Way in: `attack_job`.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.client.preparing import as_run
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.lab.privacy.canaries import CanaryStep, run_canaries, scores
from instep.lab.privacy.claims import broken_claims, measured_noise
from instep.lab.privacy.gaussian import largest_noise
from instep.lab.privacy.one_run import lower_bound
from instep.privacy.accounting import Bounds, SampledSteps, bounds
from instep.privacy.units import Units

MOST_STEPS = 1000
"""That are taken: whole epochs of these, or what there is of the first."""

_LEAST = 100
"""Canaries; with fewer nothing can be proved."""


@dataclass(frozen=True, kw_only=True)
class PrivacyAttack:
    """Outcome of an attack."""

    canaries: int
    """In each run."""
    runs: int
    steps: int
    """Taken in each."""
    planned_steps: int
    """Steps of the job."""
    noise: float
    measured_noise: float
    claimed: float
    """Upper bound of epsilon of the steps that were taken."""
    proved: float
    """Lower bound, by the attack, whatever the noise is."""
    proved_of_gaussian: float
    """Lower bound, if noise is Gaussian and independent: what `broken` is a test of."""
    confidence: float
    delta: float
    broken: tuple[str, ...]
    """Claims that do not hold."""

    @property
    def exact(self) -> bool:
        """Whether nothing speaks against what the job claims."""
        return not self.broken and self.proved <= self.claimed

    @property
    def fault(self) -> str:
        """Everything that does, in one sentence."""
        found = list(self.broken)
        if self.proved > self.claimed:
            found.append(
                f"epsilon is at least {self.proved:.4g}, and {self.claimed:.4g} is claimed"
            )
        return f"the private step does not keep what it claims: {'; '.join(found)}."

    def as_table(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"exact": self.exact, **asdict(self)}

    def lines(self) -> list[str]:
        """Everything for a person."""
        taken = f"{self.steps:,} of {self.planned_steps:,} steps"
        several = f", {self.runs} times" if self.runs > 1 else ""
        return [
            f"attack  {self.canaries:,} canaries, about half of them in, {taken}{several}",
            f"epsilon at least {self.proved_of_gaussian:.4g} (confidence {self.confidence:.0%}) of "
            f"Gaussian noise, {self.proved:.4g} of any; at most {self.claimed:.4g} as claimed, at "
            f"delta {self.delta:g}",
            f"noise   {self.measured_noise:.4g} measured, {self.noise:.4g} claimed",
            *(f"fault   {each}" for each in self.broken),
            *([] if self.broken else ["claims  noise, clipping and sampling are as accounted"]),
        ]


def attack_job(
    job: JobSpec, canaries: int, runs: int = 1, confidence: float = 0.99
) -> PrivacyAttack:
    """Attack the private step of a job.

    Args:
        job: with `[privacy]`; its recipe is built to count samples.
        canaries: how many, in each run.
        runs: with new secrets each, whose guesses count together.
        confidence: of the lower bounds.

    Raises:
        SpecError: it is not private, or there are too few canaries or runs.
    """
    if not job.privacy.on:
        raise SpecError("instep lab privacy needs a job with [privacy]. Set privacy.protects.")
    if job.privacy.of_participants:
        raise SpecError(
            "instep lab privacy attacks steps of single samples, and privacy.protects = "
            "'participant'. instep audit RUN --privacy checks the records of such a run."
        )
    if canaries < _LEAST:
        raise SpecError(f"--canaries {canaries}: too few to prove anything; {_LEAST} at least.")
    if runs < 1:
        raise SpecError(f"--runs {runs}: at least 1 is needed to attack.")
    spec = as_run(job).privacy
    samples, planned = int(spec.accounted["samples"]), int(spec.accounted["steps"])
    in_epoch = Units.of_job(job, samples).in_epoch
    epochs = max(1, MOST_STEPS // in_epoch)
    steps = min(planned, MOST_STEPS, epochs * in_epoch)
    step = CanaryStep(
        canaries,
        in_epoch,
        spec.sampling,
        spec.noise or 1.0,
        spec.clip,
        secrets.token_bytes(32),
    )
    claimed = Bounds(spec.accounted["epsilon"], spec.accounted["epsilon_lower"])
    if steps < planned:
        taken = SampledSteps(spec.sampling, in_epoch, steps)
        claimed = bounds(taken, step.noise, spec.delta or 0.0)
    return attack(step, steps, planned, claimed, spec.delta or 0.0, confidence, runs)


def attack(
    step: CanaryStep,
    steps: int,
    planned: int,
    claimed: Bounds,
    delta: float,
    confidence: float,
    runs: int = 0,
) -> PrivacyAttack:
    """Attack some steps.

    Args:
        step: its parts.
        steps: to take.
        planned: of the job.
        claimed: epsilon of the steps to take.
        delta: of the claim.
        confidence: of the lower bounds.
        runs: as for `attack_job`. The first is tested, and proves epsilon of any noise; 0 for it
            alone, and no bound of Gaussian noise, which takes long.
    """
    inside = _drawn(step.canaries)
    run = run_canaries(step, steps, inside)
    found = scores(step, run)
    right = int(((found > 0) == inside).sum())
    for _ in range(runs - 1):
        again, others = replace(step, secret=secrets.token_bytes(32)), _drawn(step.canaries)
        guessed = scores(again, run_canaries(again, steps, others)) > 0
        right += int((guessed == others).sum())
    gaussian = 0.0
    if runs:
        plan = SampledSteps(step.sampling, step.steps, steps)
        noise = largest_noise(plan, right, runs * step.canaries, confidence)
        gaussian = bounds(plan, noise, delta).lower if math.isfinite(noise) else 0.0
    return PrivacyAttack(
        canaries=step.canaries,
        runs=runs,
        steps=steps,
        planned_steps=planned,
        noise=step.noise,
        measured_noise=measured_noise(step, run),
        claimed=claimed.upper,
        proved=lower_bound(found, inside, delta, confidence),
        proved_of_gaussian=gaussian,
        confidence=confidence,
        delta=delta,
        broken=tuple(broken_claims(step, run)),
    )


def _drawn(canaries: int) -> NDArray[np.bool_]:
    """Which canaries are in: each with probability 1/2, by itself."""
    bits = np.frombuffer(secrets.token_bytes(canaries), np.uint8) % 2
    return bits.astype(np.bool_)
