"""Several datasets in shares: whole numbers of each in an epoch, and no sample more often."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.utils.data import TensorDataset

import instep
from instep.data.balance import ClassOrder
from instep.data.mixture import JoinedSources, SourceMembers, planned_shares
from instep.errors import RecipeError, SpecError
from instep.job.data import DataSpec
from instep.job.spec import JobSpec
from instep.worker.reading.planned_data import plan_data


@settings(max_examples=60, deadline=None)
@given(
    sizes=some.lists(some.integers(1, 200), min_size=1, max_size=5),
    weights=some.lists(some.floats(0.05, 20), min_size=5, max_size=5),
    ends=some.lists(some.booleans(), min_size=5, max_size=5),
)
def test_shares_are_kept_to_a_sample_and_what_ends_comes_once_at_most(sizes, weights, ends):
    sizes, weights = np.array(sizes), np.array(weights[: len(sizes)])
    ends = ends[: len(sizes)]
    planned = planned_shares(sizes, weights, ends)
    shares = weights / weights.sum()
    assert (abs(planned - planned.sum() * shares) <= 1 + 1e-6 * planned.sum()).all()
    assert (planned <= sizes)[ends].all()
    if not any(ends):
        assert planned.sum() == sizes.sum()
    else:  # one of those that end is used up
        assert ((sizes - planned)[ends] <= 1).any()


def test_each_sample_of_a_source_comes_the_floor_or_the_ceiling_of_its_mean():
    sizes, planned = np.array([10, 100, 7]), np.array([25, 60, 32])
    order, begins = ClassOrder(SourceMembers(sizes), planned, 3), [0, 10, 110, 117]
    for epochs in (1, 2, 5):
        taken = np.concatenate([order.indices(e, 0, order.samples) for e in range(epochs)])
        times = np.bincount(taken, minlength=117)
        for number, size in enumerate(sizes):
            own, mean = times[begins[number] : begins[number + 1]], epochs * planned[number] / size
            assert own.sum() == epochs * planned[number]
            assert set(own.tolist()) <= {int(np.floor(mean)), int(np.ceil(mean))}


def rows(count, first):
    numbers = torch.arange(first, first + count, dtype=torch.float64)
    return TensorDataset(numbers[:, None], numbers)


def recipe(**more):
    fields = {"train": {"web": rows(300, 0), "books": rows(40, 1000)}, **more}
    return instep.Recipe(
        model=nn.Linear(1, 1).double(), loss=nn.MSELoss(), optimizer=torch.optim.SGD, **fields
    )


def job(*sources):
    return JobSpec(recipe="a.py:recipe", seed=3, data=DataSpec(sources=sources))


def test_a_dict_of_datasets_is_planned_as_the_job_says():
    plan = plan_data(job({"name": "books", "weight": 3}, {"name": "web", "weight": 1}), recipe())
    assert plan.balanced["names"] == ["web", "books"]
    assert plan.balanced["planned"] == [85, 255]
    taken = plan.how.order.indices(0, 0, 340)
    assert ((taken >= 300).sum(), (taken < 300).sum()) == (255, 85)
    assert isinstance(recipe().train, JoinedSources)
    ends = plan_data(
        job({"name": "books", "when_exhausted": "end"}, {"name": "web", "weight": 4}), recipe()
    )
    assert ends.balanced["planned"] == [160, 40]


def test_shares_of_tokens_follow_from_the_lengths():
    shares = {"name": "books", "of": "tokens"}, {"name": "web", "of": "tokens"}
    lengths = [10] * 300 + [40] * 40
    plan = plan_data(job(*shares), recipe(length=lengths))
    assert plan.balanced["planned"] == [272, 68]
    with pytest.raises(RecipeError, match="weights of tokens, and nobody says how long samples"):
        plan_data(job(*shares), recipe())


@pytest.mark.parametrize(
    ("sources", "train", "message"),
    [
        ([], {}, r"several datasets \(web, books\), and the job does not say their shares"),
        ([{"name": "web"}], {}, "does not name books of"),
        ([{"name": "web"}, {"name": "bocks"}], {}, "no 'bocks'. Did you mean 'books'"),
        ([{"name": "web"}], {"train": rows(5, 0)}, "names web, and Recipe.train is one dataset"),
        (
            [{"name": "web", "weight": 1e9}, {"name": "books"}],
            {},
            "an epoch of 340 samples has none of 'books'",
        ),
    ],
)
def test_what_does_not_fit_the_recipe_is_refused(sources, train, message):
    with pytest.raises(SpecError, match=message):
        plan_data(job(*sources), recipe(**train))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"weight": 1.0}], r"sources\[0\] has no name"),
        ([{"name": "a", "wait": 1}], r"sources\[0\] has wait = 1. Known: name, weight"),
        ([{"name": "a", "weight": 0}], "weight = 0: needs to be a number above 0"),
        ([{"name": "a", "when_exhausted": "stop"}], "needs to be 'again' or 'end'"),
        ([{"name": "a"}, {"name": "a"}], "has a name twice"),
        ([{"name": "a", "of": "tokens"}, {"name": "b"}], "weights of samples and of tokens"),
    ],
)
def test_what_a_table_may_not_say_is_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        DataSpec(sources=tuple(sources))


def test_a_dict_of_columns_is_no_mixture():
    with pytest.raises(RecipeError, match="give rows"):
        recipe(train={"x": [1, 2], "y": [3, 4]})
