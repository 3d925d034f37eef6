"""Micro-batches are assigned completely, in order, and fairly."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from instep.data.dealing import deal

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
def test_no_deal_by_speed_could_end_earlier(micro_batches, speeds):
    shares = deal(micro_batches, len(speeds), speeds)
    assert covers(shares, micro_batches)
    end = max(len(share) / speed for share, speed in zip(shares, speeds, strict=True))
    # before `end`, none could do one more than it has, and whoever ends then could not do as many
    for share, speed in zip(shares, speeds, strict=True):
        assert (len(share) + 1) / speed >= end * (1 - 1e-9)


@pytest.mark.parametrize(
    ("micro_batches", "speeds", "counts"),
    [
        (8, [1, 1, 1, 1], [2, 2, 2, 2]),
        (4, [1, 1, 0.2, 1], [2, 1, 0, 1]),  # rather two for one than one for the slow
        (2, [2, 1], [1, 1]),  # one is done with two when the other is with one: both stay busy
        (5, [1], [5]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_a_slow_worker_may_get_nothing_but_has_work_where_that_costs_nothing(
    micro_batches, speeds, counts
):
    assert [len(share) for share in deal(micro_batches, len(speeds), speeds)] == counts


@given(micro_batches=some.integers(0, 100), speeds=speeds)
def test_the_faster_worker_never_gets_less(micro_batches, speeds):
    shares = deal(micro_batches, len(speeds), speeds)
    by_speed = sorted(zip(speeds, shares, strict=True), key=lambda pair: pair[0])
    for (slower, few), (faster, many) in pairwise(by_speed):
        assert len(few) <= len(many) or slower == faster


def test_a_worker_four_times_slower_gets_a_quarter_of_the_others_shares():
    assert [len(share) for share in deal(26, 4, [4, 4, 1, 4])] == [8, 8, 2, 8]
