"""The order is a permutation, a good shuffle, and cheap at any size."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from instep.data.order import LARGEST, Order, key, micro_batch, position, steps_in_epoch


def test_a_key_has_63_bits_and_is_the_same_on_every_machine():
    assert key(0) == 0xE220A8397B1DCDAF >> 1  # the first word of SplitMix64 from 0, as published
    assert key(7, 1, 2) == 181824114873967193
    assert key(2**70 + 1, 3) == key(2**70 % 2**64 + 1, 3)


def test_keys_tell_seed_parts_their_order_and_their_number_apart():
    keys = [key(s, *p) for s in range(50) for p in ((), (0,), (0, 0), (0, 1), (1, 0), (1,), (-1,))]
    assert len(set(keys)) == len(keys)
    assert all(0 <= number < 2**63 for number in keys)


def test_the_bits_of_keys_are_even():
    keys = np.array([key(1, 2, index) for index in range(4000)])
    for bit in range(63):
        assert abs(((keys >> bit) & 1).mean() - 0.5) < 5 * 0.5 / 4000**0.5


def test_the_order_is_a_bijection_for_every_size_up_to_5000():
    for samples in range(1, 5001):
        order = Order(samples, seed=samples).indices(samples % 3, 0, samples)
        assert order.dtype == np.int64
        assert np.array_equal(np.bincount(order, minlength=samples), np.ones(samples)), samples


@pytest.mark.parametrize("samples", [65_537, 99_991, 1 << 18, (1 << 18) - 1])
def test_the_order_of_large_datasets_is_a_bijection(samples):
    order = Order(samples, seed=3).indices(1, 0, samples)
    assert order.min() == 0
    assert np.bincount(order, minlength=samples).max() == 1


@given(samples=some.integers(1, LARGEST), at=some.floats(0, 1), seed=some.integers(0, 2**63))
def test_a_stretch_of_any_order_is_within_the_dataset_and_never_repeats(samples, at, seed):
    first = int(at * (samples - 1))
    part = Order(samples, seed).indices(5, first, min(samples, first + 300))
    assert part.min() >= 0
    assert part.max() < samples
    assert len(np.unique(part)) == len(part)


@given(samples=some.integers(1, 10**9), data=some.data())
def test_a_position_holds_the_same_sample_whatever_it_is_asked_with(samples, data):
    first = data.draw(some.integers(0, samples))
    stop = data.draw(some.integers(first, min(samples, first + 200)))
    middle = data.draw(some.integers(first, stop))
    order = Order(samples, 1)
    parts = [order.indices(0, first, middle), order.indices(0, middle, stop)]
    assert np.array_equal(np.concatenate(parts), order.indices(0, first, stop))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [Order(1000, seed).indices(e, 0, 1000) for seed in range(10) for e in range(10)]
    agreements = [np.sum(a == b) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(agreements) < 12  # two random orders agree at one place on average
    assert abs(np.mean(agreements) - 1) < 0.1


@pytest.mark.grid(2)
@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_as_likely_as_another(samples):
    draws = 3_000
    orders = [tuple(Order(samples, 9).indices(e, 0, samples).tolist()) for e in range(draws)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    possible = int(np.prod(range(1, samples + 1)))
    assert len(counts) == possible
    degrees = possible - 1
    spread = ((counts - draws / possible) ** 2).sum() / (draws / possible)
    assert abs(spread - degrees) < 5 * (2 * degrees) ** 0.5


def neighbour_distance(order):
    """0 for a perfect shuffle, in standard deviations of one."""
    n = len(order)
    mean = np.abs(np.diff(order)).mean()
    return (mean - (n + 1) / 3) / (n / 18**0.5 / n**0.5)


def block_chi_square(order, blocks=8):
    """How unevenly positions and samples meet in a grid; 0 on average, deviation 1."""
    n = len(order)
    table = np.histogram2d(np.arange(n), order, bins=blocks)[0]
    degrees = (blocks - 1) ** 2
    expected = n / blocks**2
    return (((table - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("samples", [97, 1024, 10_007])
@pytest.mark.parametrize("measure", [neighbour_distance, block_chi_square])
def test_the_shuffle_is_no_worse_than_that_of_numpy(samples, measure):
    seeds = 100
    ours = [measure(Order(samples, 11).indices(e, 0, samples)) for e in range(seeds)]
    theirs = [measure(np.random.default_rng(e).permutation(samples)) for e in range(seeds)]
    assert abs(np.mean(ours)) < abs(np.mean(theirs)) + 4 / seeds**0.5
    assert np.std(ours) < 1.4 * np.std(theirs)


@given(samples=some.integers(1, 500), batch=some.integers(1, 100), epochs=some.integers(1, 3))
def test_steps_cover_every_position_of_every_epoch_once_and_in_order(samples, batch, epochs):
    steps = steps_in_epoch(samples, batch)
    places = [position(step, samples, batch) for step in range(1, epochs * steps + 1)]
    met = [(place.epoch, at) for place in places for at in range(place.first, place.stop)]
    assert met == [(epoch, at) for epoch in range(epochs) for at in range(samples)]
    assert all(place.stop - place.first == batch for place in places if place.stop < samples)


@given(first=some.integers(0, 10**12), size=some.integers(0, 300), of=some.integers(1, 64))
def test_micro_batches_are_contiguous_even_and_complete(first, size, of):
    parts = [micro_batch(first, first + size, number, of) for number in range(of)]
    assert parts[0][0] == first
    assert parts[-1][1] == first + size
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    sizes = [stop - begin for begin, stop in parts]
    assert max(sizes) - min(sizes) <= 1
