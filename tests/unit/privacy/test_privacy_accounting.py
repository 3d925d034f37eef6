"""Epsilon, against dp-accounting used directly, and by what must hold of any bound."""

from __future__ import annotations

import random
import sys

import pytest

from instep.errors import SpecError
from instep.privacy import accounting
from instep.privacy.accounting import SampledSteps, bounds, noise_for, steps_within
from lazily import Lazy, needs

dp = Lazy("dp_accounting")
pytestmark = [needs("dp_accounting"), needs("PLD_accounting")]


def test_poisson_is_what_dp_accounting_says():
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    event = dp.PoissonSampledDpEvent(1 / 100, dp.GaussianDpEvent(1.1))
    accountant.compose(event, 500)
    upper, lower = bounds(SampledSteps("poisson", 100, 500), 1.1, 1e-5)
    assert upper == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert lower <= upper <= lower * 1.05


def test_allocation_is_between_near_bounds_and_hardly_above_poisson():
    plan = SampledSteps("allocation", 20, 100)
    upper, lower = bounds(plan, 1.0, 1e-5)
    assert lower <= upper <= lower / 0.95
    assert upper <= 1.01 * bounds(plan._replace(sampling="poisson"), 1.0, 1e-5).upper
    # the tight bounds of the library's own composition of five epochs
    assert lower <= 3.0014
    assert upper >= 2.9887


def test_more_noise_fewer_steps_and_a_larger_delta_mean_less():
    random.seed(2)
    for _ in range(2):
        plan = SampledSteps("poisson", random.randrange(1, 300), random.randrange(1, 800))
        noise, delta = random.uniform(1.2, 4.0), 10 ** -random.uniform(4, 8)
        own = bounds(plan, noise, delta).upper
        assert bounds(plan, noise * 1.1, delta).upper <= own
        assert bounds(plan, noise, delta * 2).upper <= own
        assert bounds(plan._replace(steps=plan.steps + 50), noise, delta).upper >= own
    one = SampledSteps("allocation", 1, 3)  # every sample in every step: nothing but Gaussians
    assert bounds(one, 2.0, 1e-5) == bounds(one._replace(sampling="poisson"), 2.0, 1e-5)


def test_noise_is_found_for_a_budget_and_a_budget_gives_steps():
    plan = SampledSteps("poisson", 10, 40)
    noise = noise_for(plan, 0.8, 1e-5)
    assert bounds(plan, noise, 1e-5).upper <= 0.8 < bounds(plan, noise * 0.98, 1e-5).upper
    fewer = steps_within(plan, noise, 0.5, 1e-5)
    assert bounds(plan._replace(steps=fewer), noise, 1e-5).upper <= 0.5
    assert bounds(plan._replace(steps=fewer + 2), noise, 1e-5).upper > 0.5
    with pytest.raises(SpecError, match="not even the first"):
        steps_within(plan, 0.3, 0.1, 1e-5)


def test_a_missing_library_is_named_with_the_extra(monkeypatch):
    accounting._gaussian.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)
    with pytest.raises(SpecError, match=r"needs dp-accounting.*instep\[privacy\]"):
        bounds(SampledSteps("poisson", 10, 10), 1.0, 1e-5)
