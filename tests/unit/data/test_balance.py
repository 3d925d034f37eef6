"""Classes come as often as planned, in one epoch and over all, at any batch."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.data.balance import (
    ClassOrder,
    InProportion,
    Members,
    Wished,
    class_weights,
    planned_counts,
)
from instep.data.step_sizes import EvenSizes

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def codes_of(counts):
    return np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts))


def within(counts, wishes):
    return (counts >= np.floor(wishes - 1e-9)).all() and (counts <= np.ceil(wishes + 1e-9)).all()


def counted(order, epoch, positions, samples, step=7):
    parts = [
        order.indices(epoch, first, min(first + step, positions))
        for first in range(0, positions, step)
    ]
    return np.bincount(np.concatenate(parts), minlength=samples)


@given(counts=COUNTS, how=st.sampled_from(["inverse", "effective"]), seed=st.integers(0, 9))
def test_each_sample_comes_the_floor_or_ceiling_of_its_wish_over_any_number_of_epochs(
    counts, how, seed
):
    codes = codes_of(counts)
    members = Members(codes)
    planned = planned_counts(members.counts, how)
    order, wishes = ClassOrder(members, planned, seed), (planned / members.counts)[codes]
    total = np.zeros(len(codes), np.int64)
    for epoch in range(5):
        found = counted(order, epoch, order.samples, len(codes), step=61)
        assert found.min() >= 1  # no sample is left out
        assert within(found, wishes)
        assert np.array_equal(np.bincount(codes, weights=found), planned)
        total += found
        assert within(total, (epoch + 1) * wishes)
    indices, times = order.indices(2, 0, order.samples), order.times(2, 0, order.samples)
    assert len({*zip(indices.tolist(), times.tolist(), strict=True)}) == order.samples
    if how == "inverse":
        assert planned.tolist() == [max(counts)] * len(counts)


@given(
    weights=st.lists(st.floats(0, 5), min_size=2, max_size=40).filter(lambda given: sum(given) > 1),
    copies=st.integers(1, 8),
    many=st.integers(1, 90),
    seed=st.integers(0, 9),
)
def test_a_samplers_weights_are_wishes_of_each_sample(weights, copies, many, seed):
    given_weights = np.tile(weights, copies)
    wishes = given_weights / given_weights.sum() * many
    order, total = Wished(given_weights, seed, many), np.zeros(len(wishes), np.int64)
    for epoch in range(6):
        positions = order.positions(epoch)
        if not positions:
            continue
        found = counted(order, epoch, positions, len(wishes))
        assert within(found, wishes)
        total += found
        assert within(total, (epoch + 1) * wishes)
        sizes = EvenSizes(4, 3, order.positions)
        cuts = [sizes.of(epoch, n)[1:] for n in range(4)]
        assert cuts == [(positions * n // 4, positions * (n + 1) // 4) for n in range(4)]
    indices, times = (ask(5, 0, order.positions(5)) for ask in (order.indices, order.times))
    assert len({*zip(indices.tolist(), times.tolist(), strict=True)}) == order.positions(5)


def test_a_samplers_weights_are_all_that_is_kept_for_a_sample():
    weights = np.random.default_rng(1).random(1 << 22)
    tracemalloc.start()
    order = Wished(weights, 5, len(weights))
    for epoch in range(2):
        assert len(order.indices(epoch, 500_000, 500_512)) == 512
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * len(weights)


def test_torchs_sampler_leaves_a_third_unseen_where_the_plan_leaves_none():
    torch.manual_seed(1)
    drawn = torch.utils.data.WeightedRandomSampler([1.0] * 10_000, 10_000)
    assert 0.35 < 1 - len(set(drawn)) / 10_000 < 0.39
    planned = Wished(np.ones(10_000), 1)
    assert (counted(planned, 0, planned.positions(0), 10_000, step=1000) == 1).all()


@given(counts=COUNTS, size=st.integers(1, 30), epoch=st.integers(0, 3))
def test_every_stretch_has_the_classes_in_proportion_and_an_epoch_each_sample_once(
    counts, size, epoch
):
    codes = codes_of(counts)
    order = InProportion(Members(codes), 5)
    samples = len(codes)
    assert (counted(order, epoch, samples, samples, step=size) == 1).all()
    share = np.array(counts) / samples
    for first in range(0, samples, size):
        stop = min(first + size, samples)
        found = np.bincount(codes[order.indices(epoch, first, stop)], minlength=len(counts))
        away = np.abs(found - (stop - first) * share)
        assert (away <= 2 + len(counts) * share).all()


def test_a_tenth_of_a_set_is_in_each_batch_of_a_stratified_epoch():
    codes = codes_of([900, 90, 10])
    order = InProportion(Members(codes), 7)
    batches = [
        np.bincount(codes[order.indices(1, n, n + 100)], minlength=3) for n in range(0, 1000, 100)
    ]
    assert all(88 <= a <= 92 and 8 <= b <= 10 and 0 <= c <= 2 for a, b, c in batches), batches


def test_weights_are_those_of_the_papers():
    counts = np.array([5000, 500, 50])
    inverse = class_weights(counts, "inverse")
    np.testing.assert_allclose(inverse * counts, counts.sum() / 3)
    effective = class_weights(counts, "effective")
    wanted = (1 - 0.999) / (1 - 0.999**counts)
    np.testing.assert_allclose(effective / effective[0], wanted / wanted[0])
    np.testing.assert_allclose((effective * counts).sum(), counts.sum())
    np.testing.assert_allclose(class_weights(np.array([10**9, 1]), "effective")[1] > 1, True)


@pytest.mark.slow
def test_an_order_of_many_samples_is_planned_within_a_second():
    members = Members(np.repeat([0, 1], [4_000_000, 40_000]))
    order = ClassOrder(members, planned_counts(members.counts, "inverse"), 1)
    assert order.samples == 8_000_000
    assert len(order.indices(3, 7_999_000, 8_000_000)) == 1000
