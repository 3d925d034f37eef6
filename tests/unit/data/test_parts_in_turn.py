"""The order of a stream: parts in turn, mixed within windows, each sample once in an epoch."""

from itertools import zip_longest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as some

from instep.data.reading.streams.turns import StreamPlan, Turns

few = settings(max_examples=60, deadline=None)
SIZES = some.lists(some.integers(0, 30), min_size=1, max_size=7).filter(sum)


def in_turn(sizes):
    """(part, count), of each part that has not ended one, again and again."""
    rounds = zip_longest(*([(p, n) for n in range(size)] for p, size in enumerate(sizes)))
    return [place for each in rounds for place in each if place is not None]


def places(order, epoch, first, stop):
    return [order.plan.place(n) for n in order.indices(epoch, first, stop).tolist()]


@few
@given(sizes=SIZES, batch=some.integers(1, 40), seed=some.integers(0, 9))
def test_a_step_has_what_parts_give_in_turn_and_an_epoch_each_sample_once(sizes, batch, seed):
    plan = StreamPlan(len(sizes), 1, False, tuple(sizes), sum(sizes))
    order, wanted = Turns(plan, seed, batch), in_turn(sizes)
    for first in range(0, sum(sizes), batch):
        stop = min(first + batch, sum(sizes))
        found = [(at.part, at.at) for at in places(order, 2, first, stop)]
        assert found == sorted(wanted[first:stop])
    every = order.indices(2, 0, sum(sizes))
    assert len(np.unique(every)) == sum(sizes)
    assert not np.isin(every, order.indices(1, 0, sum(sizes))).any()


@few
@given(
    sizes=SIZES, batch=some.integers(1, 20), window=some.integers(1, 12), cut=some.integers(0, 99)
)
def test_a_window_of_a_part_is_mixed_within_itself_alone(sizes, batch, window, cut):
    total = sum(sizes)
    plan = StreamPlan(len(sizes), window, True, tuple(sizes), total)
    order = Turns(plan, 3, batch)
    found = places(order, 1, 0, total)
    for part, size in enumerate(sizes):
        counts = np.array([at.at for at in found if at.part == part], np.int64)
        assert sorted(counts.tolist()) == list(range(size))
        assert (counts // window == np.arange(size) // window).all()
    first = cut % total  # any cut of the same positions gives the same samples
    halves = [order.indices(1, 0, first), order.indices(1, first, total)]
    assert np.array_equal(np.concatenate(halves), order.indices(1, 0, total))


def test_an_endless_stream_has_whole_windows_whatever_its_steps():
    short = Turns(StreamPlan(3, 8, True, None, 60), 5, 12)
    long = Turns(StreamPlan(3, 8, True, None, 6000), 5, 12)
    one, other = places(short, 0, 0, 60), places(long, 0, 0, 60)
    assert one == other
    assert {at.part for at in one} == {0, 1, 2}
    assert len({*one}) == 60
