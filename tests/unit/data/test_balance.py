"""Micro-batches are dealt completely, in order, and fairly."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from instep.data.balance import deal
from instep.data.order import Order, micro_batch, position, steps_in_epoch

speeds = some.lists(some.floats(1e-3, 1e3), min_size=1, max_size=12)


def covers(shares, micro_batches):
    return [number for share in shares for number in share] == list(range(micro_batches))


@given(micro_batches=some.integers(0, 200), workers=some.integers(1, 40))
def test_an_even_deal_covers_all_and_differs_by_one_at_most(micro_batches, workers):
    shares = deal(micro_batches, workers)
    assert covers(shares, micro_batches)
    sizes = [len(share) for share in shares]
    assert len(sizes) == workers
    assert max(sizes) - min(sizes) <= 1


@given(micro_batches=some.integers(0, 200), speeds=speeds)
def test_a_deal_by_speed_covers_all_and_leaves_no_worker_idle_that_could_have_one(
    micro_batches, speeds
):
    shares = deal(micro_batches, len(speeds), speeds)
    assert covers(shares, micro_batches)
    assert micro_batches < len(speeds) or all(shares)


@given(micro_batches=some.integers(1, 200), speeds=speeds)
def test_a_share_is_within_one_of_the_ideal_where_each_ideal_is_one_or_more(micro_batches, speeds):
    ideal = [micro_batches * speed / sum(speeds) for speed in speeds]
    if min(ideal) >= 1:
        for share, wanted in zip(deal(micro_batches, len(speeds), speeds), ideal, strict=True):
            assert abs(len(share) - wanted) <= 1 + 1e-9


@given(micro_batches=some.integers(0, 100), speeds=speeds)
def test_the_faster_worker_never_gets_less(micro_batches, speeds):
    shares = deal(micro_batches, len(speeds), speeds)
    by_speed = sorted(zip(speeds, shares, strict=True), key=lambda pair: pair[0])
    for (slower, few), (faster, many) in pairwise(by_speed):
        assert len(few) <= len(many) or slower == faster


def test_a_worker_four_times_slower_gets_a_quarter_of_the_others_shares():
    assert [len(share) for share in deal(26, 4, [4, 4, 1, 4])] == [8, 8, 2, 8]


@pytest.mark.parametrize("workers", range(1, 9))
def test_global_batches_are_the_same_for_any_number_of_workers(workers):
    samples, batch, parts = 1797, 64, 8
    order = Order(samples, seed=7)
    for step in range(1, 2 * steps_in_epoch(samples, batch) + 1):
        epoch, first, stop = position(step, samples, batch)
        got = []
        for share in deal(parts, workers):
            for number in share:
                got += order.indices(epoch, *micro_batch(first, stop, number, parts)).tolist()
        assert got == order.indices(epoch, first, stop).tolist()
