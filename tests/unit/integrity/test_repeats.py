"""Who computes what twice, and who is found to be wrong: tables and laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.data.dealing import deal
from instep.integrity.repeats import (
    Recomputed,
    Repeat,
    by_majority,
    by_trial,
    repeats_every,
    repeats_of,
)

SIZES = st.tuples(st.integers(2, 9), st.integers(1, 40)).filter(lambda size: size[1] >= size[0])
"""Workers, and micro-batches of a step."""


@given(SIZES)
def test_repeating_costs_at_most_two_in_a_hundred_passes(size):
    workers, parts = size
    every = repeats_every(parts, workers)
    fewest = min(len(own) for own in deal(parts, workers))
    assert every * fewest >= 50
    assert every >= 10


@pytest.mark.parametrize(
    ("parts", "workers", "every"),
    [(8, 2, 20), (8, 1, 10), (16, 2, 10), (64, 4, 10), (8, 8, 80), (8, 3, 40), (2, 4, 80)],
)
def test_how_often_follows_from_how_many_passes_a_worker_has(parts, workers, every):
    assert repeats_every(parts, workers) == every


@given(SIZES, st.integers(1, 60))
def test_in_a_step_with_repeats_every_worker_is_looked_at_once_and_looks_once(size, turn):
    workers, parts = size
    dealt = deal(parts, workers)
    repeats = repeats_of(10 * turn, 10, dealt)
    assert [r.owner for r in repeats] == list(range(workers))
    assert sorted(r.second for r in repeats) == list(range(workers))
    assert all(r.second != r.owner and r.number in dealt[r.owner] for r in repeats)
    assert repeats_of(10 * turn + 1, 10, dealt) == []


@given(SIZES)
def test_in_time_each_looks_at_every_micro_batch_of_each_other(size):
    workers, parts = size
    dealt, seen = deal(parts, workers), set()
    for turn in range(1, 1 + (workers - 1) * max(map(len, dealt))):
        seen |= {(r.second, r.owner) for r in repeats_of(10 * turn, 10, dealt)}
        seen |= {r.number for r in repeats_of(10 * turn, 10, dealt)}
    assert {(a, b) for a in range(workers) for b in range(workers) if a != b} <= seen
    assert set(range(parts)) <= seen


def test_who_has_no_micro_batch_is_not_looked_at_but_may_look():
    repeats = repeats_of(10, 10, deal(1, 3))
    assert [(r.owner, r.number) for r in repeats] == [(2, 0)]


def test_a_worker_alone_repeats_nothing():
    assert repeats_of(10, 10, deal(8, 1)) == []


@pytest.mark.parametrize(
    ("values", "named", "suspects"),
    [
        ([1, 1, 2], (2,), ()),
        ([3, 1, 1, 1], (0,), ()),
        ([1, 2, 1, 3, 1], (1, 3), ()),
        ([1, 2], (), (0, 1)),
        ([1, 2, 3], (), (0, 1, 2)),
        ([1, 1, 2, 2], (), (0, 1, 2, 3)),
    ],
)
def test_the_majority_names_the_odd_one(values, named, suspects):
    verdict = by_majority(values)
    assert (verdict.named, verdict.suspects) == (named, suspects)


EDGE = Repeat(owner=0, number=3, second=1)
A, B, C = (
    Recomputed(7, 7, nothing=True),
    Recomputed(8, 8, nothing=True),
    Recomputed(7, 8, nothing=True),
)
STUCK = Recomputed(8, 8, nothing=False)


@pytest.mark.parametrize(
    ("before", "trials", "named", "suspects"),
    [
        ((7, 8), [A, A], (1,), ()),  # a single flip: the second had 8 once
        ((8, 7), [A, A], (0,), ()),
        ((7, 8), [A, C], (1,), ()),  # it has one and the other
        ((7, 8), [A, B, A], (1,), ()),  # it stands by it, and is alone
        ((7, 8), [A, B, B], (0,), ()),
        ((7, 8), [A, STUCK], (1,), ()),
        ((7, 8), [A, B], (), (0, 1)),
        ((7, 8), [STUCK._replace(first=7, second=7), STUCK], (), (0, 1)),
        ((7, 8), [A, B, Recomputed(9, 9, nothing=True)], (), (0, 1)),
        ((7, 8), [A, A, C], None, None),  # two that do not repeat themselves
        ((7, 8), [C, C], None, None),
    ],
)
def test_a_trial_names_who_does_not_stand_by_it_or_stands_alone(before, trials, named, suspects):
    verdict = by_trial(EDGE, dict(enumerate(before)), trials)
    if named is None:
        assert verdict is None
    else:
        assert (verdict.named, verdict.suspects) == (named, suspects)
