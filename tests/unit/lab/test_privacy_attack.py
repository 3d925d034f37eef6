"""The attack on private steps passes right ones, and finds each fault that is planted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from instep.lab.privacy.attack import attack
from instep.lab.privacy.canaries import CanaryStep, run_canaries, scores
from instep.lab.privacy.claims import broken_claims
from instep.lab.privacy.one_run import lower_bound
from instep.privacy.accounting import Bounds, SampledSteps, bounds
from planted_faults import CANARIES, DELTA, FAULTS, a_step, no_noise, noise_of

TAKEN = 20
CLAIMED = Bounds(2.5, 2.4)


def sides(seed=0):
    return np.random.default_rng(1000 + seed).random(CANARIES) < 0.5


def found(step, taken=TAKEN, claimed=CLAIMED):
    return attack(step, taken, taken, claimed, DELTA, 0.99)


def test_the_right_step_keeps_what_it_claims():
    for seed, sampling in enumerate(("allocation", "poisson", "allocation", "poisson")):
        outcome = found(a_step(seed, sampling=sampling))
        assert outcome.exact, outcome.fault
        assert outcome.proved <= outcome.claimed


@pytest.mark.slow
def test_it_does_a_hundred_times():
    wrong = [found(a_step(seed)).broken for seed in range(100)]
    assert not any(wrong), wrong


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant):
    step = a_step()
    plant(step)
    assert found(step).broken


def test_without_noise_the_attack_alone_proves_more_than_is_claimed():
    step = a_step()
    no_noise(step)
    outcome = found(step)
    assert outcome.proved > outcome.claimed
    assert not outcome.exact


def test_guesses_prove_nothing_where_nothing_is_to_be_seen_and_much_where_all_is():
    generator = np.random.default_rng(0)
    inside, noise = generator.permutation(CANARIES) % 2 == 0, generator.normal(size=CANARIES)
    assert lower_bound(noise, inside, DELTA, 0.99) == 0.0
    all_right = lower_bound(np.where(inside, 1.0, 0.0), inside, 0.0, 0.99)
    # all of n right with odds p has the probability p^n: the bound is where that is the doubt
    odds = (0.01 / 5) ** (1 / CANARIES)
    assert all_right == pytest.approx(math.log(odds / (1 - odds)), abs=0.02)


def test_scores_are_of_the_canaries_that_are_in():
    step, inside = a_step(noise=0.6), sides()
    run = run_canaries(step, TAKEN, inside)
    assert not broken_claims(step, run)
    order = np.argsort(scores(step, run))
    assert inside[order[-50:]].mean() > 0.9
    assert inside[order[:50]].mean() < 0.3


@pytest.mark.tail
@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_of_gaussian_noise_it_proves_four_fifths_of_the_truth(epsilon):
    pytest.importorskip("dp_accounting")
    step = CanaryStep(1000, 1, "allocation", noise_of(epsilon), 1.0, bytes(32))
    outcome = attack(step, 1, 1, Bounds(epsilon, epsilon), DELTA, 0.99, runs=50)
    assert 0.8 * epsilon <= outcome.proved_of_gaussian <= 1.02 * epsilon


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_of_sampled_steps_it_proves_less_than_the_truth_and_not_little(sampling):
    pytest.importorskip("dp_accounting")
    step = CanaryStep(500, 4, sampling, 0.6, 1.0, bytes(32))
    truth = bounds(SampledSteps(sampling, 4, 8), 0.6, DELTA)
    outcome = attack(step, 8, 8, truth, DELTA, 0.99, runs=10)
    assert 0.6 * truth.lower <= outcome.proved_of_gaussian <= 1.02 * truth.upper
