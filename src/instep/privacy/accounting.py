"""Epsilon of a run for a delta, by the libraries that know how to compute it.

The adjacency: two datasets of the same size are neighbours if they differ in the content of one
sample, which in one of them is nothing. The adversary sees the parameters after every step.

Poisson sampling is accounted by dp-accounting, random allocation by PLD_accounting (Feldman and
Shenfeld, arXiv:2602.17284). Both give an upper bound and a lower one. Way in: `bounds`.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache
from typing import Any, NamedTuple

from instep.errors import SpecError

_INTERVAL = 1e-4
"""Into which losses are rounded, where one release is Gaussian, or sampled by Poisson."""

_COARSEST, _FINEST = 0.04, 0.0025
"""Those for an epoch of allocation. The gap of the bounds is proportional to it, and time to its
inverse square: a coarse one tells which is fine enough."""

_GAP, _AIM = 0.05, 0.9
"""How far apart they may be, relative to the upper one; and how much of that is aimed at."""

_CLOSE = 1e-3
"""Relative distance of the noise that `noise_for` finds from the least that would do."""


_MOST = 1024
"""The largest noise that `noise_for` looks at."""


class SampledSteps(NamedTuple):
    """How samples come into steps."""

    sampling: str
    """`allocation` or `poisson`."""
    in_epoch: int
    """Steps of an epoch."""
    steps: int
    """Steps of the whole run."""

    @property
    def epochs(self) -> int:
        """That were at least begun."""
        return math.ceil(self.steps / self.in_epoch)


class Bounds(NamedTuple):
    """Two figures between which epsilon is."""

    upper: float
    lower: float


@lru_cache(maxsize=64)
def bounds(plan: SampledSteps, noise: float, delta: float) -> Bounds:
    """Epsilon of a run.

    Args:
        plan: its steps.
        noise: standard deviation over the sensitivity of a sum.
        delta: above 0 and below 1.

    Raises:
        SpecError: the library is not installed.
    """
    if plan.steps < 1:
        return Bounds(0.0, 0.0)
    if plan.sampling == "allocation" and plan.in_epoch > 1:
        return _of_allocation(plan, noise, delta)
    rate = 1 / plan.in_epoch
    upper, lower = (
        _epsilon(_gaussian(noise, rate, pessimistic), plan.steps, delta)
        for pessimistic in (True, False)
    )
    return Bounds(upper, min(lower, upper))


def _of_allocation(plan: SampledSteps, noise: float, delta: float) -> Bounds:
    # whatever is known of the steps, a sample is in one of each epoch
    upper, lower = _epsilon(_gaussian(noise, 1.0, True), plan.epochs, delta), 0.0
    interval = _COARSEST
    while True:
        above, below = (
            _epsilon(_allocation(noise, plan.in_epoch, pessimistic, interval), plan.epochs, delta)
            for pessimistic in (True, False)
        )
        upper, lower = min(upper, above), max(lower, below)
        if upper - lower <= _GAP * upper or interval <= _FINEST:
            return Bounds(upper, lower)
        wanted = interval * _AIM * _GAP * (above + below) / (2 * max(above - below, 1e-9))
        interval = max(_FINEST, min(wanted, interval / 2))


def noise_for(plan: SampledSteps, epsilon: float, delta: float) -> float:
    """Noise with which a run is within a budget; hardly more than it takes.

    Raises:
        SpecError: as `bounds`; or no noise that makes sense is enough.
    """
    # Poisson's is quick, and that of allocation is hardly ever larger
    quick = plan._replace(sampling="poisson")
    low, high = 0.5, 1.0
    while _upper(quick, high, delta) > epsilon:
        low, high = high, 2 * high
        if low > _MOST:
            raise SpecError(
                f"privacy.epsilon = {epsilon:g} with privacy.delta = {delta:g}: {plan.steps:,} "
                f"steps would take more noise than {_MOST:,} times what one sample may change. "
                "Train fewer steps, or allow more."
            )
    while _upper(quick, low, delta) <= epsilon:  # a small noise takes long
        low, high = low / 2, low
    while high / low > 1 + _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _upper(quick, middle, delta) <= epsilon else (middle, high)
    while bounds(plan, high, delta).upper > epsilon:
        high *= 1.01
    return float(f"{high:.4g}") if float(f"{high:.4g}") >= high else high


def steps_within(plan: SampledSteps, noise: float, epsilon: float, delta: float) -> int:
    """Steps of a run, of those planned, that a budget is enough for; with allocation whole epochs.

    Raises:
        SpecError: as `bounds`; or it is not enough for one.
    """
    each = plan.in_epoch if plan.sampling == "allocation" else 1

    def fits(units: int) -> bool:
        some = plan._replace(steps=min(plan.steps, units * each))
        if plan.sampling == "poisson":
            return _upper(some, noise, delta) <= epsilon
        return bounds(some, noise, delta).upper <= epsilon

    low, high = 0, math.ceil(plan.steps / each)
    if fits(high):
        return plan.steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise SpecError(
            f"privacy.noise = {noise:g} with privacy.epsilon = {epsilon:g}: not even the first "
            f"{'epoch' if each > 1 else 'step'} is within it. Use more noise, or allow more."
        )
    return low * each


def _upper(plan: SampledSteps, noise: float, delta: float) -> float:
    sampled = _gaussian(noise, 1 / plan.in_epoch, True, 1e-3)
    return _epsilon(sampled, plan.steps, delta)


def _epsilon(loss: Any, times: int, delta: float) -> float:
    return max(0.0, float(loss.self_compose(times).get_epsilon_for_delta(delta)))


@lru_cache(maxsize=64)
def _gaussian(noise: float, rate: float, pessimistic: bool, interval: float = _INTERVAL) -> Any:
    """The privacy loss of one release of which a sample is a part with a probability."""
    loss = _library("dp_accounting.pld.privacy_loss_distribution")
    return loss.from_gaussian_mechanism(
        noise,
        value_discretization_interval=interval,
        pessimistic_estimate=pessimistic,
        sampling_prob=rate,
        use_connect_dots=pessimistic,  # it knows no lower bounds
    )


@lru_cache(maxsize=64)
def _allocation(noise: float, steps: int, pessimistic: bool, interval: float) -> Any:
    """The privacy loss of an epoch in which a sample is in one step."""
    library = _library("PLD_accounting")
    return library.gaussian_allocation_pld(
        params=library.PrivacyParams(sigma=noise, num_steps=steps),
        config=library.AllocationSchemeConfig(loss_discretization=interval),
        bound_type=library.BoundType.DOMINATES if pessimistic else library.BoundType.IS_DOMINATED,
    )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise SpecError(
            f"[privacy] needs {package}, which computes epsilon and is not installed. "
            'Install it with: pip install "instep[privacy]"'
        ) from error
