"""Batches of samples of about one length: each sample once, at equal cost, in mixed order."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.data.balance import ClassOrder, Members, planned_counts
from instep.data.lengths import ByLength, equal_parts, evenly_cut
from instep.data.order import Order
from instep.data.windowed import Windowed

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=90)


def by_length(lengths, *, window=20, tokens=None, batch=8, parts=3, seed=1, base=None):
    column = np.array(lengths)
    base = base or Order(len(column), seed)
    positions = getattr(base, "samples", len(column))
    return ByLength(
        base,
        positions,
        lambda indices: column[indices],
        window=window,
        seed=seed,
        micro_batches=parts,
        tokens=tokens,
        batch=batch,
    )


@given(
    lengths=LENGTHS,
    window=st.integers(1, 100),
    tokens=st.none() | st.integers(1, 300),
    parts=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_each_sample_once_in_batches_and_parts_that_follow_each_other(
    lengths, window, tokens, parts, epoch
):
    order, end, found = by_length(lengths, window=window, tokens=tokens, parts=parts), 0, []
    for number in range(order.steps):
        where = order.of(epoch, number)
        assert (where.epoch, where.first) == (epoch, end)
        assert where.stop > where.first
        cuts, end = list(where.cuts), where.stop
        assert (cuts[0], cuts[-1], len(cuts)) == (where.first, where.stop, parts + 1)
        sizes = np.diff(cuts)
        assert (sizes >= (1 if where.size >= parts else 0)).all()
        found.append(order.indices(epoch, where.first, where.stop))
    assert end == order.positions(epoch) == order.total == len(lengths)
    assert sorted(np.concatenate(found).tolist()) == [*range(len(lengths))]
    again = by_length(lengths, window=window, tokens=tokens, parts=parts)  # another process
    halves = [again.indices(epoch, 0, end // 3), again.indices(epoch, end // 3, end)]
    assert np.array_equal(np.concatenate(halves), np.concatenate(found))
    if tokens is None:
        assert {len(batch) for batch in found} <= {end // order.steps, -(-end // order.steps)}
        assert max(map(len, found)) <= 8


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9), parts=st.integers(1, 4))
def test_no_other_cut_of_a_batch_has_a_cheaper_dearest_part(lengths, parts):
    lengths.sort()

    def cost(cuts):
        pairs = itertools.pairwise(cuts)
        return max((stop - first) * lengths[stop - 1] for first, stop in pairs if stop > first)

    cuts = equal_parts(lengths, parts)
    inner = itertools.combinations_with_replacement(range(len(lengths) + 1), parts - 1)
    assert cost(cuts) == min(cost([0, *each, len(lengths)]) for each in inner)


@given(costs=st.lists(st.integers(1, 50), min_size=6, max_size=60), parts=st.integers(1, 6))
def test_batches_of_a_window_cost_about_the_same(costs, parts):
    ends = evenly_cut(np.array(costs), parts)
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends.tolist()])]
    assert all(sums)
    if max(costs) * parts <= sum(costs):  # none is larger than its share by more than one sample
        assert max(abs(each - sum(costs) / parts) for each in sums) <= max(costs)


def long_tail(samples):
    drawn = np.random.default_rng(2).lognormal(4.5, 0.9, samples)
    return np.clip(drawn, 4, 2000).astype(np.int64)


def test_a_long_tail_has_little_padding_and_no_wave_of_lengths():
    lengths = long_tail(60_000)
    order = by_length(lengths, window=16_384, tokens=8192, parts=8)
    batches = [order.of(0, number) for number in range(order.steps)]
    tokens = np.array([lengths[order.indices(*where)].sum() for where in batches])
    assert tokens.mean() <= 8192
    assert abs(tokens.mean() / 8192 - 1) < 0.01
    assert tokens.std() / tokens.mean() < 0.1
    means = tokens / [where.size for where in batches]
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.15
    assert all(order.padding(0, window) < 0.04 for window in range(3))
    cost = [
        [(b - a) * lengths[order.indices(0, a, b)].max() for a, b in itertools.pairwise(w.cuts)]
        for w in batches[:50]
    ]
    assert np.mean([max(each) / np.mean(each) for each in cost]) < 1.15


def test_windows_of_shards_stay_within_them():
    lengths, sizes = long_tail(4000), [500] * 8
    order = by_length(lengths, window=500, tokens=4000, base=Windowed(sizes, 500, 3), parts=2)
    where = [order.of(1, number) for number in range(order.steps)]
    for batch in where:
        assert len(np.unique(order.indices(*batch) // 500)) <= 2
    assert sorted(order.indices(1, 0, 4000).tolist()) == [*range(4000)]


def test_samples_that_come_again_are_told_apart():
    codes = np.repeat([0, 1], [40, 3])
    base = ClassOrder(members := Members(codes), planned_counts(members.counts, "inverse"), 1)
    order = by_length(long_tail(43), base=base, tokens=700, window=30)
    indices, times = order.indices(2, 0, 80), order.times(2, 0, 80)
    assert len({*zip(indices.tolist(), times.tolist(), strict=True)}) == 80
    assert np.bincount(indices).tolist() == np.bincount(base.indices(2, 0, 80)).tolist()
    assert by_length([3, 4]).times is None


@pytest.mark.slow
def test_a_billion_samples_are_planned_within_a_second_and_cost_no_memory_for_each():
    import time
    import tracemalloc

    samples = 10**9
    column = np.random.default_rng(1).integers(1, 500, 1 << 16)  # repeated: no file of 4 GB
    tracemalloc.start()
    began = time.perf_counter()
    order = ByLength(
        Order(samples, 5),
        samples,
        lambda indices: column[indices & 0xFFFF],
        window=16_384,
        seed=5,
        micro_batches=8,
        tokens=65_536,
    )
    where = order.of(7, order.steps // 2)
    assert len(order.indices(*where)) == where.size
    print(f"{time.perf_counter() - began:.2f} s")
    assert tracemalloc.get_traced_memory()[1] < 80e6
    tracemalloc.stop()


def test_a_sample_longer_than_a_batch_is_one_and_makes_no_other_batch_smaller():
    order = by_length([10] * 200 + [2000], window=1000, tokens=100)
    assert order.steps == 21
    batches = [order.of(0, number) for number in range(order.steps)]
    found = [order.indices(0, each.first, each.stop) for each in batches]
    (alone,) = (each for each in found if 200 in each)
    assert alone.tolist() == [200]
    assert {len(each) for each in found if 200 not in each} == {10}
