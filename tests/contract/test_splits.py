"""Every split keeps the promises of `Scheme`, and refuses what it cannot split in one sentence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.splits import COLUMNS, SPLITS, Request
from instep.data.splits.columns import Column
from instep.errors import DataError

quick = settings(max_examples=40, deadline=None)


def request_of(name, samples=60, seed=0, **more):
    draw = np.random.default_rng(seed)
    columns = {
        "labels": np.repeat(np.arange(3), -(-samples // 3))[:samples],
        "groups": draw.permutation(np.arange(samples) % max(samples // 4, 1)),
        "times": draw.integers(0, samples, samples),
    }
    if name == "hash":  # small numbers are dealt unevenly
        columns["groups"] = draw.permutation(samples)
    used = {key: Column(f"Recipe.{key}", columns[key]) for key in COLUMNS.get(name, ())}
    return Request(samples=samples, seed=seed, **used, **more)


@pytest.mark.parametrize("name", SPLITS)
@quick
@given(
    samples=st.integers(48, 200),
    seed=st.integers(0, 99),
    how=st.one_of(
        st.floats(0.3, 0.7).map(lambda share: {"validation": share}),
        st.integers(2, 4).flatmap(
            lambda folds: st.integers(0, folds - 1).map(lambda at: {"folds": folds, "fold": at})
        ),
    ),
)
def test_two_sides_are_disjoint_in_order_and_the_same_again(name, samples, seed, how):
    request = request_of(name, samples, seed, **how)
    sides = SPLITS[name](request)
    for side in sides:
        assert side.dtype == np.int64
        assert len(side)
        assert (np.diff(side) > 0).all()
        assert 0 <= side[0] <= side[-1] < samples
    assert not set(sides.train) & set(sides.validate)
    if name != "time":  # where a gap, or the future, is on no side
        assert len(sides.train) + len(sides.validate) == samples
    again = SPLITS[name](request)
    assert all(np.array_equal(*each) for each in zip(sides, again, strict=True))


@pytest.mark.parametrize("name", SPLITS)
def test_over_all_folds_a_sample_is_validated_on_once(name):
    request = request_of(name, folds=5)
    every = np.concatenate([SPLITS[name](replace(request, fold=n)).validate for n in range(5)])
    assert len(set(every.tolist())) == len(every)
    assert name == "time" or len(every) == 60


@pytest.mark.parametrize("name", SPLITS)
def test_nothing_can_be_split_in_more_parts_than_there_are_samples(name):
    def every_fold():
        return [SPLITS[name](request_of(name, folds=61, fold=fold)) for fold in range(61)]

    with pytest.raises(DataError, match=r"\.$") as caught:
        every_fold()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "field"), [(n, c) for n, cs in COLUMNS.items() for c in cs])
def test_a_missing_value_and_a_column_of_another_length_are_named(name, field):
    request = request_of(name)
    column = getattr(request, field)
    holes = column.values.astype(float)
    holes[17] = np.nan
    texts = [f"2026-01-{1 + each % 28:02d}" for each in column.values]
    texts[3] = None
    for values, sample in ((holes, 17), (texts, 3)):
        wrong = replace(request, **{field: column._replace(values=values)})
        with pytest.raises(DataError, match=rf"Recipe\.{field} has no value for sample {sample}"):
            SPLITS[name](wrong)
    with pytest.raises(DataError, match=rf"{field} has 59 values, and the dataset has 60 samples"):
        SPLITS[name](replace(request, **{field: column._replace(values=column.values[:59])}))


@pytest.mark.parametrize("name", ["group", "hash", "random", "stratified", "stratified_group"])
def test_another_seed_gives_other_sides(name):
    first, other = (
        SPLITS[name](request_of(name) if s is None else replace(request_of(name), seed=s))
        for s in (None, 8)
    )
    assert not np.array_equal(first.validate, other.validate)


@pytest.mark.parametrize("name", ["group", "stratified_group"])
@pytest.mark.parametrize("how", [{}, {"folds": 4, "fold": 1}])
def test_a_group_is_on_one_side(name, how):
    request = request_of(name, 200, **how)
    train, validate = (set(request.groups.values[side]) for side in SPLITS[name](request))
    assert not train & validate
