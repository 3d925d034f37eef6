"""A lower bound of epsilon for noise of the kind that is accounted, from guesses about canaries.

`one_run.py` assumes nothing of the mechanism, and so proves little. Here one thing is assumed that
`claims.py` tests: numbers of canaries get independent Gaussian noise. Then guesses are independent,
and how often the best guess is right follows from the size of the noise alone. Many right guesses
prove that it is at most so large, and accounting says which epsilon is the least that such noise
has (Nasr et al. 2023, arXiv:2302.07956, bound a Gaussian mechanism so). Way in: `largest_noise`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.lab.privacy.canaries import log_ratios
from instep.lab.privacy.one_run import tails
from instep.privacy.accounting import SampledSteps

_DRAWN = 1 << 23
"""Numbers that are drawn to find how often guesses are right."""

_MOST_DRAWN = 200_000
"""Canaries that are drawn for it, at most."""

_ERRORS = 3.0
"""Standard errors of that, all taken to speak against the bound."""

_CLOSE = 1e-3


def largest_noise(plan: SampledSteps, right: int, guesses: int, confidence: float) -> float:
    """The largest noise with which so many guesses would still be right.

    Args:
        plan: the steps that were taken.
        right: guesses that were, of whether a canary was in.
        guesses: all of them; each canary was in with probability 1/2.
        confidence: with which it is no larger, such as 0.99.

    Returns:
        Standard deviation over the sensitivity; infinity where nothing is proved.
    """
    least = _least_chance(right, guesses, 1 - confidence)
    chance = _Drawn(plan).chance if plan.in_epoch > 1 else partial(_of_all_steps, plan.steps)
    low, high = 2.0**-6, 2.0**10
    if chance(high) >= least:
        return math.inf
    while high / low > 1 + _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if chance(middle) > least else (low, middle)
    return high


def _least_chance(right: int, guesses: int, doubt: float) -> float:
    """The least chance of a right guess with which so many have a probability above `doubt`."""
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if tails(guesses, middle)[right] > doubt else (middle, high)
    return low


def _of_all_steps(steps: int, noise: float) -> float:
    """How often the best guess is right, where a canary is in each step or in none."""
    return 0.5 + 0.5 * math.erf(math.sqrt(steps / 8) / noise)


class _Drawn:
    """Noise of canaries, the same for each size of it."""

    def __init__(self, plan: SampledSteps) -> None:
        self._plan = plan
        count = max(1000, min(_MOST_DRAWN, _DRAWN // plan.steps))
        generator = np.random.default_rng(0)
        self._noise = generator.standard_normal((plan.steps, count), np.float32)
        self._given = np.zeros((plan.steps, count), np.bool_)
        for first in range(0, plan.steps, plan.in_epoch):
            if plan.sampling == "poisson":
                some = slice(first, min(first + plan.in_epoch, plan.steps))
                shape = self._given[some].shape
                self._given[some] = generator.random(shape, np.float32) * plan.in_epoch < 1
                continue
            steps = first + generator.integers(plan.in_epoch, size=count)
            within = np.flatnonzero(steps < plan.steps)
            self._given[steps[within], within] = True

    def chance(self, noise: float) -> float:
        """How often the best guess is right, at most."""
        out: NDArray[Any] = noise * self._noise
        correct = [
            log_ratios(seen, noise, self._plan.in_epoch, self._plan.sampling) > 0
            for seen in (out, out + self._given)
        ]
        found = float(1 - correct[0].mean() + correct[1].mean()) / 2
        error = math.sqrt(found * (1 - found) / (2 * self._noise.shape[1]))
        return found + _ERRORS * error
