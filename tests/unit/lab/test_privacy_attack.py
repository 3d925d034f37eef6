"""The attack on private steps passes right ones, and finds each fault that is planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from instep.lab.privacy.attack import attack
from instep.lab.privacy.canaries import CanaryStep, run_canaries, scores
from instep.lab.privacy.claims import broken_claims
from instep.lab.privacy.one_run import lower_bound
from instep.privacy.accounting import Bounds, SampledSteps, bounds
from instep.privacy.sampling import Allocation

CANARIES, STEPS, TAKEN, DELTA = 500, 10, 20, 1e-5
CLAIMED = Bounds(2.5, 2.4)


def a_step(seed=0, noise=1.0, sampling="allocation"):
    secret = np.random.default_rng(seed).bytes(32)
    return CanaryStep(CANARIES, STEPS, sampling, noise, 1.0, secret)


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


# ---- faults: each changes a step


def with_noise(step, change):
    """The numbers of a step's noise go through a function of step and noise."""
    plain = step.released

    def released(number, samples):
        clean = np.zeros(step.canaries)
        clean[samples] = step.amplitude
        rest = plain(number, samples) - clean
        return clean + change(number, rest, clean > 0)

    step.released = released


def no_noise(step):
    with_noise(step, lambda number, rest, given: 0.0 * rest)


def half_of_the_noise(step):
    with_noise(step, lambda number, rest, given: 0.5 * rest)


def noise_of_each_of_two_workers(step):
    with_noise(step, lambda number, rest, given: math.sqrt(2) * rest)


def noise_a_little_too_small(step):
    with_noise(step, lambda number, rest, given: 0.9 * rest)


def no_noise_in_one_step(step):
    with_noise(step, lambda number, rest, given: rest * (number != 7))


def noise_only_where_something_is(step):
    with_noise(step, lambda number, rest, given: rest * given)


def noise_that_is_cut_at_two(step):
    limit = 2 * step.sigma
    with_noise(step, lambda number, rest, given: np.clip(1.137 * rest, -limit, limit))


def the_same_noise_in_every_step(step):
    kept = {}
    with_noise(step, lambda number, rest, given: kept.setdefault("noise", rest))


def the_same_noise_in_every_second_step(step):
    kept = {}
    with_noise(step, lambda number, rest, given: kept.setdefault(number % 2, rest))


def one_number_of_noise_for_two(step):
    with_noise(step, lambda number, rest, given: np.repeat(rest[::2], 2))


def uniform_noise(step):
    generator, width = np.random.default_rng(3), math.sqrt(12) * step.sigma
    with_noise(step, lambda number, rest, given: (generator.random(len(rest)) - 0.5) * width)


def nothing_is_clipped(step):
    plain = step.per_sample._add

    def not_clipped(gradients, found):
        plain(gradients, found)
        plain(gradients, found)

    step.per_sample._add = not_clipped


def the_mean_is_clipped_and_not_each(step):
    plain = step.per_sample.sums

    def clipped(batch, samples):
        mean = plain(batch, samples)[0].double()
        mean *= step.amplitude / max(float(mean.norm()), 1e-9)
        return [mean.round().to(torch.int32)]

    step.per_sample.sums = clipped


def divided_by_the_samples_that_came(step):
    plain = step.released

    def released(number, samples):
        return plain(number, samples) * step.drawn.planned / max(1, 2 * len(samples))

    step.released = released


class Shuffled(Allocation):
    """Batches of one size."""

    def _steps_of(self, key):
        order = np.concatenate(super()._steps_of(key))
        return np.array_split(order, self.steps)


class TwiceTheFirst(Allocation):
    """The first step has some of the second too."""

    def _steps_of(self, key):
        found = super()._steps_of(key)
        return [np.concatenate([found[0], found[1][:5]]), *found[1:]]


class Uneven(Allocation):
    """Some samples are in the first step each time."""

    def _steps_of(self, key):
        found = super()._steps_of(key)
        moved = [each[each >= 20] for each in found]
        return [np.concatenate([moved[0], np.arange(20)]), *moved[1:]]


def drawn_by(kind):
    def change(step):
        step.drawn = kind(step.canaries, step.drawn.planned, step.secret)

    change.__name__ = kind.__name__
    return change


FAULTS = [
    no_noise,
    half_of_the_noise,
    noise_of_each_of_two_workers,
    noise_a_little_too_small,
    no_noise_in_one_step,
    noise_only_where_something_is,
    noise_that_is_cut_at_two,
    the_same_noise_in_every_step,
    the_same_noise_in_every_second_step,
    one_number_of_noise_for_two,
    uniform_noise,
    nothing_is_clipped,
    the_mean_is_clipped_and_not_each,
    divided_by_the_samples_that_came,
    *map(drawn_by, (Shuffled, TwiceTheFirst, Uneven)),
]


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


def noise_of(epsilon):
    """Noise of one step with this epsilon, by the closed form of Balle and Wang 2018."""

    def delta(noise):
        def below(x):
            return 0.5 * math.erfc(-x / math.sqrt(2))

        shift = epsilon * noise
        return below(0.5 / noise - shift) - math.exp(epsilon) * below(-0.5 / noise - shift)

    low, high = 0.1, 50.0
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high


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
