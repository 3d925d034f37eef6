"""Which samples private steps have: each in one step of an epoch, drawn uniformly."""

from __future__ import annotations

import numpy as np
import pytest

from instep.privacy.sampling import NOTHING, Allocation, Poisson

KEY = bytes(range(32))


def test_each_sample_is_in_one_step_of_each_epoch():
    sampling = Allocation(1000, 64, KEY)
    for epoch in (0, 1, 7):
        steps = [sampling.of_step(epoch, number) for number in range(sampling.steps)]
        assert sorted(np.concatenate(steps).tolist()) == list(range(1000))
    assert sampling.planned == 1000 / 16


def test_sample_and_step_are_independent_over_two_thousand_epochs():
    samples, epochs = 40, 2000
    sampling = Allocation(samples, 10, KEY)
    counted = np.zeros((samples, sampling.steps))
    pairs = np.zeros((sampling.steps, sampling.steps))
    for epoch in range(epochs):
        step_of = np.empty(samples, int)
        for number in range(sampling.steps):
            step_of[sampling.of_step(epoch, number)] = number
        counted[np.arange(samples), step_of] += 1
        pairs[step_of[0], step_of[1]] += 1
    expected = epochs / sampling.steps
    square = ((counted - expected) ** 2 / expected).sum()
    assert 60 < square < 195  # 120 degrees of freedom, p > 1e-5
    joint = epochs / sampling.steps**2
    assert ((pairs - joint) ** 2 / joint).sum() < 45  # 15, where equal sizes give more


def test_poisson_takes_each_sample_into_each_step_with_one_probability():
    sampling = Poisson(400, 40, KEY)
    sizes = [len(sampling.of_step(epoch, n)) for epoch in range(100) for n in range(sampling.steps)]
    assert abs(np.mean(sizes) - 40) < 1.0
    assert abs(np.var(sizes) - 36) < 8.0


@pytest.mark.parametrize("kind", [Allocation, Poisson])
def test_places_say_nothing_of_how_many_samples_a_step_has(kind):
    sampling = kind(3000, 100, KEY)
    assert sampling.positions == sampling.steps * sampling.places
    whole = sampling.indices(2, 0, sampling.positions).reshape(sampling.steps, -1)
    sizes = (whole != NOTHING).sum(1)
    assert sizes.std() > 5
    quarters = [(part != NOTHING).sum(1) for part in np.array_split(whole, 4, 1)]
    assert max(abs(each - sizes / 4).max() for each in quarters) < 3  # micro-batches are even
    again = kind(3000, 100, KEY)
    assert (again.indices(2, 130, 777) == whole.reshape(-1)[130:777]).all()
    assert (kind(3000, 100, bytes(32)).indices(2, 0, 777) != whole.reshape(-1)[:777]).any()
