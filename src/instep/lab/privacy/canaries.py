"""Private steps over canaries, by the parts that a run has: sampling, clipping, grid, noise.

A canary's gradient is far above the limit, and along a direction that no other one has: with a
linear model whose inputs are one-hot, that is its own weight. So each released number shows one
canary and the noise, and there is no stronger attack on a step. Canaries make up the whole
dataset; a step has them as often as the job's steps have its samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from instep.privacy.gradients.per_sample import PerSample
from instep.privacy.grid import MARGIN, Grid
from instep.privacy.sampling import SAMPLINGS, PrivateSampling
from instep.privacy.sums import PrivateSums

Floats = NDArray[np.float64]

_FAR = 1e3
"""How far above the limit a canary's gradient is."""


@dataclass
class CanaryStep:
    """The parts of a private step over canaries.

    Args:
        canaries: how many.
        steps: of an epoch.
        sampling: `allocation` or `poisson`.
        noise: standard deviation over the sensitivity.
        clip: limit of a gradient's norm.
        secret: of 32 bytes.
    """

    canaries: int
    steps: int
    sampling: str
    noise: float
    clip: float
    secret: bytes

    def __post_init__(self) -> None:
        batch: Any = self.canaries / self.steps
        self.drawn: PrivateSampling = SAMPLINGS[self.sampling](self.canaries, batch, self.secret)
        self.model = nn.Linear(self.canaries, 1, bias=False)
        self.grid = Grid(self.clip, self.canaries, self.drawn.places)
        parameters = list(self.model.parameters())
        self.per_sample = PerSample(self.model, parameters, _loss, self.grid)
        given = parameters, self.grid, self.noise, self.drawn.planned, self.secret
        self.sums = PrivateSums(*given)

    @property
    def amplitude(self) -> float:
        """Share of a canary in a sum, in units of the grid."""
        return self.grid.per_clip * (1 - MARGIN)

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise, in units of the grid."""
        return self.noise * self.grid.sensitivity

    def released(self, number: int, samples: NDArray[np.int64]) -> Floats:
        """Numbers that step `number`, from 1, publishes, in units of the grid: [canaries]."""
        whole = [torch.zeros(1, self.canaries, dtype=torch.int32)]
        if len(samples):
            inputs = torch.zeros(len(samples), self.canaries)
            inputs[range(len(samples)), samples] = _FAR * self.clip
            whole = self.per_sample.sums((inputs,), len(samples))
        self.sums.seal(number, whole)
        found = self.sums.gradient(0, whole[0]).double().numpy().reshape(-1)
        self.sums.end_step()
        scaled: Floats = found * self.drawn.planned / self.grid.unit
        return scaled


def _loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    found: Tensor = model(batch[0]).mean()
    return found


@dataclass(frozen=True)
class CanaryRun:
    """Everything that an attacker sees of a run, and what is true of it."""

    released: Floats
    """[steps, canaries], in units of the grid."""
    given: NDArray[np.bool_]
    """[steps, canaries]: which canary was in which step."""
    inside: NDArray[np.bool_]
    """[canaries]: which are in the run."""


def run_canaries(step: CanaryStep, steps: int, inside: NDArray[np.bool_]) -> CanaryRun:
    """Take private steps with half of the canaries in.

    Args:
        step: its parts.
        steps: of the run.
        inside: [canaries], which of them are in.
    """
    released = np.zeros((steps, step.canaries))
    given = np.zeros((steps, step.canaries), np.bool_)
    for number in range(steps):
        epoch, place = divmod(number, step.steps)
        samples = step.drawn.of_step(epoch, place)
        samples = samples[inside[samples]]
        given[number, samples] = True
        released[number] = step.released(number + 1, samples)
    return CanaryRun(released, given, inside)


def scores(step: CanaryStep, run: CanaryRun) -> Floats:
    """[canaries]: the logarithm of how much likelier it is that each was in than that it was not.

    The attacker knows how samples are drawn, and not what was drawn.
    """
    seen = run.released / step.amplitude
    return log_ratios(seen, step.sigma / step.amplitude, step.steps, step.sampling)


def log_ratios(seen: NDArray[Any], sigma: float, in_epoch: int, sampling: str) -> Floats:
    """How much likelier it is that each canary was in than that it was not, [canaries] logarithms.

    Args:
        seen: [steps, canaries], where a canary that is in counts 1.
        sigma: standard deviation of the noise.
        in_epoch: steps of an epoch.
        sampling: `allocation` or `poisson`.
    """
    ratios = (seen - 0.5) / sigma**2
    rate = 1 / in_epoch
    if sampling == "poisson":
        if rate < 1:
            ratios = np.logaddexp(np.log1p(-rate), ratios + np.log(rate))
        summed: Floats = ratios.sum(0)
        return summed
    total = np.zeros(seen.shape[1])
    for first in range(0, len(ratios), in_epoch):
        part = ratios[first : first + in_epoch]
        found = np.logaddexp.reduce(part, axis=0) + np.log(rate)
        if (left := 1 - rate * len(part)) > 1e-9:  # an epoch that was not finished
            found = np.logaddexp(found, np.log(left))
        total += found
    return total
