"""Splits against scikit-learn, and what is said of data that cannot be split."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instep.data.splits import SPLITS, Request
from instep.data.splits.columns import Column
from instep.data.splits.sides import permuted
from instep.data.splits.stratified_group import folds_of
from instep.errors import DataError
from lazily import Lazy

truth = Lazy("sklearn.model_selection")
quick = settings(max_examples=40, deadline=None)


def column(values):
    return Column("Recipe.it", values)


def folds(name, count, **given):
    every = [SPLITS[name](Request(folds=count, fold=fold, **given)) for fold in range(count)]
    return [tuple(map(np.ndarray.tolist, sides)) for sides in every]


def of_truth(splitter, *columns):
    return [tuple(map(np.ndarray.tolist, each)) for each in splitter.split(*columns)]


@quick
@given(samples=st.integers(5, 90), count=st.integers(2, 5), seed=st.integers(0, 9))
def test_folds_of_blocks_and_of_random_are_those_of_k_fold(samples, count, seed):
    expected = of_truth(truth.KFold(count), np.zeros(samples))
    assert folds("blocks", count, samples=samples) == expected
    order = permuted(samples, seed)
    shuffled = [tuple(np.sort(order[side]).tolist() for side in each) for each in expected]
    assert folds("random", count, samples=samples, seed=seed) == shuffled


@quick
@given(
    sizes=st.lists(st.integers(1, 40), min_size=5, max_size=30, unique=True),
    count=st.integers(2, 5),
    equal=st.booleans(),
)
def test_folds_of_groups_are_those_of_group_k_fold(sizes, count, equal):
    sizes = [*sizes, *sizes[:3]] if equal else sizes
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    expected = of_truth(truth.GroupKFold(count), groups, None, groups)
    found = folds("group", count, samples=len(groups), groups=column(groups))
    if equal:  # which of equally large groups is where, the seed decides
        found, expected = ([[*map(len, each)] for each in every] for every in (found, expected))
    assert found == expected


@quick
@given(
    counts=st.lists(st.integers(5, 30), min_size=2, max_size=6),
    count=st.integers(2, 5),
    seed=st.integers(0, 9),
)
def test_folds_of_classes_have_as_many_of_each_as_those_of_stratified_k_fold(counts, count, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    expected = of_truth(truth.StratifiedKFold(count), labels, labels)
    given = {"samples": len(labels), "labels": column(labels), "seed": seed}
    found = folds("stratified", count, **given)
    for mine, theirs in zip(found, expected, strict=True):
        for own, other in zip(mine, theirs, strict=True):
            assert np.bincount(labels[own]).tolist() == np.bincount(labels[other]).tolist()


@quick
@given(seed=st.integers(0, 99), count=st.integers(2, 4), many=st.integers(8, 30))
def test_the_rule_for_classes_and_groups_is_that_of_stratified_group_k_fold(seed, count, many):
    draw = np.random.default_rng(seed)
    groups, labels = draw.integers(0, many, 200), draw.integers(0, 3, 200)
    splitter = truth.StratifiedGroupKFold(count)
    expected = [test.tolist() for _, test in splitter.split(groups, labels, groups)]
    _, groups = np.unique(groups, return_inverse=True)
    counts = np.zeros((groups.max() + 1, 3), np.int64)
    np.add.at(counts, (groups, labels), 1)
    where = folds_of(counts, np.arange(len(counts)), count)[groups]
    assert [np.flatnonzero(where == fold).tolist() for fold in range(count)] == expected


@quick
@given(
    samples=st.integers(6, 90),
    count=st.integers(2, 5),
    gap=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_folds_of_different_times_are_those_of_time_series_split(samples, count, gap, seed):
    assume(samples - gap - samples // (count + 1) * count > 0)
    times = np.random.default_rng(seed).permutation(samples)
    splitter = truth.TimeSeriesSplit(count, gap=gap)
    expected = of_truth(splitter, np.zeros(samples))
    found = folds("time", count, samples=samples, times=column(times), gap=gap)
    at = np.argsort(times)
    assert found == [tuple(sorted(at[side].tolist()) for side in each) for each in expected]


TIMES = st.one_of(
    st.lists(st.integers(-20, 20), min_size=8, max_size=80).map(np.array),
    st.lists(st.integers(2**62, 2**62 + 20), min_size=8, max_size=80).map(np.array),
    st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=80).map(np.array),
)


@settings(max_examples=200, deadline=None)
@given(
    times=TIMES,
    gap=st.sampled_from([0, 0.5, 1, 2.5, 7]),
    embargo=st.sampled_from([None, 0, 1.5, 4]),
    how=st.sampled_from([{"validation": 0.2}, *({"folds": 3, "fold": n} for n in range(3))]),
)
def test_nothing_is_validated_on_that_is_not_later_than_training_and_the_gap(
    times, gap, embargo, how
):
    embargo = embargo if "folds" in how else None
    gap = gap if times.dtype == np.float64 else Fraction(gap)  # exact where times are whole
    request = Request(
        samples=len(times), times=column(times), gap=float(gap), embargo=embargo, **how
    )
    try:
        sides = SPLITS["time"](request)
    except DataError:  # too few times, or all of them within the gap
        assume(False)
    trained, validated = (times[side].tolist() for side in sides)
    first, last = min(validated), max(validated)
    assert all(each in validated for each in times.tolist() if first <= each <= last)
    before = [each for each in trained if each < first]
    after = [each for each in trained if each >= first]
    assert not before or first > max(before) + gap
    assert embargo is not None or not after
    assert not after or min(after) - last > embargo
    # what could be trained on is
    assert len(before) == sum(each + gap < first for each in times.tolist())


def test_few_different_times_are_cut_wherever_they_can_be():
    times = np.array([0] * 90 + list(range(1, 6)))
    found = folds("time", 5, samples=95, times=column(times))
    assert [len(validate) for _, validate in found] == [1, 1, 1, 1, 1]
    with pytest.raises(DataError, match=r"has 6 different times, and data\.folds = 6 needs 7.*few"):
        folds("time", 6, samples=95, times=column(times))
    with pytest.raises(DataError, match="1 different time, and two sides need 2"):
        SPLITS["time"](Request(samples=9, times=column(np.zeros(9))))


def test_a_gap_that_leaves_nothing_is_refused_with_both_times():
    request = Request(samples=10, times=column(np.arange(10)), gap=9)
    with pytest.raises(DataError, match=r"gap = 9 leaves nothing.*begins at 9.*begins at 0"):
        SPLITS["time"](request)


def test_dates_are_times_in_any_form_and_lengths_of_time_are_in_seconds():
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    dates = [begin + timedelta(days=day) for day in (3, 0, 1, 2, 9, 5, 4, 6, 7, 8)]
    naive = [each.replace(tzinfo=None) for each in dates]
    forms = [
        dates,
        naive,
        [each.date() for each in dates],
        [each.isoformat() for each in dates],
        [each.date().isoformat() for each in dates],
        np.array(naive, "datetime64[s]"),
        np.array(naive, "datetime64[ns]"),
    ]
    for form in forms:
        for gap in ("2d", 2 * 86400):
            request = Request(samples=10, times=column(form), gap=gap, validation=0.2)
            train, validate = SPLITS["time"](request)
            assert validate.tolist() == [4, 9]
            assert train.tolist() == [0, 1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["2026-01-01", "yesterday"], "has 'yesterday', which is no time"),
        (np.array([1.0, np.inf]), "no finite time for sample 1"),
        (np.array(["2026-01-01", "NaT"], "datetime64[s]"), "no value for sample 1"),
        (np.array([True, False]), "which is no time"),
        (np.zeros((2, 2)), r"shape \[2, 2\]"),
    ],
)
def test_what_is_no_time_is_named_with_its_sample(values, text):
    with pytest.raises(DataError, match=text):
        SPLITS["time"](Request(samples=2, times=column(values)))


def test_a_length_with_a_unit_needs_times_with_one():
    request = Request(samples=9, times=column(np.arange(9)), gap="2d")
    with pytest.raises(DataError, match=r"data\.gap = '2d', and the times are plain numbers"):
        SPLITS["time"](request)


def test_small_classes_and_few_groups_are_refused_with_figures():
    labels = column(["cat"] * 8 + ["dog"] * 3 + ["owl"])
    few = Request(samples=12, labels=labels)
    with pytest.raises(DataError, match=r"'owl' of Recipe\.it has 1 sample, and each of the two"):
        SPLITS["stratified"](few)
    labels = column(["cat"] * 8 + ["dog"] * 4)
    with pytest.raises(DataError, match=r"'dog'.* 4 samples, and data\.folds = 5.*fewer data"):
        SPLITS["stratified"](Request(samples=12, labels=labels, folds=5))
    groups = Request(samples=12, groups=labels, folds=3)
    with pytest.raises(DataError, match=r"has 2 groups, and data\.folds = 3 needs 3.*at most 2"):
        SPLITS["group"](groups)
    with pytest.raises(DataError, match="leaves the training side of 12 samples empty"):
        SPLITS["random"](Request(samples=12, validation=0.99))


@quick
@given(counts=st.lists(st.integers(2, 50), min_size=1, max_size=6), share=st.floats(0.05, 0.95))
def test_a_share_of_classes_is_rounded_and_leaves_one_of_each(counts, share):
    labels = np.repeat(np.arange(len(counts)), counts)
    request = Request(samples=len(labels), labels=column(labels), validation=share)
    train, validate = (
        np.bincount(labels[side], minlength=len(counts)) for side in SPLITS["stratified"](request)
    )
    assert (np.abs(validate - share * np.array(counts)) < 1).all()
    assert (train > 0).all()


@quick
@given(sizes=st.lists(st.integers(1, 9), min_size=12, max_size=60), seed=st.integers(0, 9))
def test_a_share_of_groups_is_near_the_share_of_samples(sizes, seed):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    request = Request(samples=len(groups), groups=column(groups), seed=seed, validation=0.5)
    validate = SPLITS["group"](request).validate
    assert abs(len(validate) - len(groups) / 2) <= 9


def test_with_a_hash_a_sample_stays_on_its_side_when_data_are_added():
    for names in (list(range(400)), [f"user {n}" for n in range(400)], np.arange(400) / 2):
        for how in ({"validation": 0.25}, {"folds": 5, "fold": 2}):
            shuffled = np.random.default_rng(0).permutation(400)
            few, many = names[:300], [names[n] for n in shuffled]
            first = SPLITS["hash"](Request(samples=300, groups=column(few), **how))
            later = SPLITS["hash"](Request(samples=400, groups=column(many), **how))
            chosen = {many[n] for n in later.validate}
            assert {few[n] for n in first.validate} == {each for each in few if each in chosen}
            assert 50 < len(chosen) < 150
    as_array = SPLITS["hash"](Request(samples=400, groups=column(np.arange(400))))
    as_list = SPLITS["hash"](Request(samples=400, groups=column(list(range(400)))))
    assert np.array_equal(as_array.validate, as_list.validate)
    kept = replace(Request(samples=400, groups=column(list(range(400)))), seed=1)
    assert not np.array_equal(as_list.validate, SPLITS["hash"](kept).validate)


def test_the_sides_of_a_seed_are_these_on_every_machine():
    sides = SPLITS["random"](Request(samples=20, seed=7, validation=0.25))
    assert sides.validate.tolist() == [0, 1, 4, 6, 14]
