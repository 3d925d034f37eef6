"""Faults of a private step, each planted into a right one: the auditor is to find them all."""

from __future__ import annotations

import math

import numpy as np
import torch

from instep.lab.privacy.canaries import CanaryStep
from instep.privacy.sampling import Allocation

CANARIES, STEPS, DELTA = 500, 10, 1e-5


def a_step(seed=0, noise=1.0, sampling="allocation"):
    """A right one, of a secret that follows from the seed."""
    secret = np.random.default_rng(seed).bytes(32)
    return CanaryStep(CANARIES, STEPS, sampling, noise, 1.0, secret)


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
