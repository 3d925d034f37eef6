"""A sampler of the user's is planned for what it means in torch, or refused by name."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import instep
from instep.data.order import Order
from instep.data.samplers.drawn_once import DrawnOnce, waiting
from instep.errors import DataError, RecipeError, SpecError
from instep.job.spec import DataSpec, JobSpec
from instep.worker.reading.planned_data import plan_data, say_balance
from made_up_runs import make_run, write_events

SAMPLES = 60
NUMBERS = TensorDataset(torch.arange(SAMPLES))


def planned(sampler, dataset, *, order="global"):
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    if type(sampler) is BatchSampler:
        loader = DataLoader(dataset, batch_sampler=sampler)
    recipe = instep.Recipe(
        model=nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD, train=loader
    )
    job = JobSpec(recipe="a.py:recipe", seed=3, data=DataSpec(order=order))
    return recipe.train, plan_data(job, recipe)


def plan(weights, samples=None, **options):
    data = TensorDataset(torch.zeros(len(weights), 1), torch.zeros(len(weights), 1))
    sampler = WeightedRandomSampler(weights, samples or len(weights), **options)
    return planned(sampler, data)[1]


def test_each_sample_comes_as_often_as_its_weight_says_to_within_one():
    weights = [0.0, 1.0, 1.0, 2.0, 4.0, 0.0, 8.0, 0.0]
    order = plan(weights).how.order
    taken = np.concatenate([order.indices(e, 0, order.positions(e)) for e in range(4)])
    wished = 4 * 8 * np.array(weights) / sum(weights)
    found = np.bincount(taken, minlength=8)
    assert (np.abs(found - wished) < 1).all()
    assert not found[np.array(weights) == 0].any()


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("again", [True, False])
def test_a_weight_that_is_none_is_refused(wrong, again):
    with pytest.raises(RecipeError, match="with a weight below 0 or not finite"):
        plan([1.0, 2.0, wrong, 1.0], replacement=again)


def test_weights_of_which_none_is_above_0_are_refused():
    with pytest.raises(RecipeError, match="or with no weight above 0"):
        plan([0.0, 0.0])


def test_an_epoch_that_may_have_no_sample_for_a_step_is_refused():
    with pytest.raises(SpecError, match=r"num_samples = 1, and .* leaves some of its 1 steps"):
        plan([1.0] * 50, 1)
    assert plan([1.0] * 50, 50).how.order.fewest() == 50


def _weighted(**options):
    return WeightedRandomSampler(torch.arange(SAMPLES) % 7, **options)


SAMPLERS = {
    "all": RandomSampler(NUMBERS),
    "some": RandomSampler(NUMBERS, num_samples=17),
    "more than all": RandomSampler(NUMBERS, num_samples=150),
    "with replacement": RandomSampler(NUMBERS, replacement=True),
    "some with replacement": RandomSampler(NUMBERS, replacement=True, num_samples=25),
    "weighted": _weighted(num_samples=20, replacement=False),
    "all of the weighted": _weighted(num_samples=51, replacement=False),
    "in batches": BatchSampler(_weighted(num_samples=9, replacement=False), 4, False),
    "a subset": SubsetRandomSampler([5, 3, 3, 40], torch.Generator()),
    "dealt": DistributedSampler(NUMBERS, num_replicas=1, rank=0),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_has_as_many_samples_as_in_torch_and_none_that_torch_would_not_give(name):
    sampler = SAMPLERS[name]
    theirs = [*sampler] if name != "in batches" else [n for batch in sampler for n in batch]
    data, found = planned(sampler, NUMBERS)
    order, total = found.how.order or Order(len(data), 3), Counter()
    for epoch in range(6):
        positions = found.batches.positions(epoch)
        ours = [int(data[i][0]) for i in order.indices(epoch, 0, positions).tolist()]
        assert len(ours) == len(theirs)
        total.update(ours)
        if "replacement" not in name:
            most = max(Counter(theirs).values())
            assert max(Counter(ours).values()) == most
    if name in ("all", "all of the weighted", "a subset", "dealt"):
        assert total == Counter(theirs * 6)
    elif "weighted" not in name and name != "in batches":
        times = 6 * len(theirs) / SAMPLES
        assert {total[n] for n in range(SAMPLES)} <= {math.floor(times), math.ceil(times)}


def chi_square(draws, weights):
    """Statistic of ordered draws of three, against the law of drawing one after the other."""
    found, statistic = Counter(map(tuple, draws)), 0.0
    for picked in itertools.permutations(np.flatnonzero(weights).tolist(), 3):
        left, chance = weights.sum(), 1.0
        for each in picked:
            chance, left = chance * weights[each] / left, left - weights[each]
        wanted = chance * len(draws)
        statistic += (found.pop(picked, 0) - wanted) ** 2 / wanted
    assert not found
    return statistic


def test_draws_without_replacement_have_the_law_of_torchs():
    weights, epochs = np.array([1.0, 2.0, 0.0, 3.0, 4.0]), 6000
    order = DrawnOnce(weights, 5, 3)
    torch.manual_seed(1)
    rows = torch.from_numpy(weights).expand(epochs, 5)
    theirs = torch.multinomial(rows, 3, replacement=False)
    ours = [order.indices(epoch, 0, 3).tolist() for epoch in range(epochs)]
    of_24 = 60.0  # a statistic with 23 degrees of freedom is above it once in 30,000 times
    assert chi_square(theirs.tolist(), weights) < of_24
    assert chi_square(ours, weights) < of_24


def test_waiting_times_are_minus_the_logarithm_of_their_keys():
    words = np.random.default_rng(1).integers(0, 1 << 63, 10_000).astype(np.uint64)
    words[:3] = 0, 1, (1 << 63) - 1
    np.testing.assert_allclose(waiting(words), -np.log((words + 0.5) / 2.0**63), rtol=1e-14)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (_weighted(num_samples=52, replacement=False), "52, but 51 weights above 0"),
        (WeightedRandomSampler([1.0] * SAMPLES, 61, False), "61, but 60 weights above 0"),
    ],
)
def test_more_draws_than_torch_could_make_are_refused(sampler, words):
    with pytest.raises(RecipeError, match=words):
        planned(sampler, NUMBERS)


@pytest.mark.parametrize("name", ["some", "weighted"])
def test_a_draw_does_not_go_with_another_order(name):
    with pytest.raises(SpecError, match=r"'windowed', and Recipe\.train's DataLoader has a "):
        planned(SAMPLERS[name], NUMBERS, order="windowed")


@pytest.mark.parametrize("again", [True, False])
def test_a_resumed_run_refuses_a_sampler_with_other_weights(tmp_path, again):
    run, weights = make_run(tmp_path / "run"), np.arange(1.0, 9.0)
    before = plan(weights, 5, replacement=again)
    write_events(run, [{"event": "data_balanced", "time": 1.0, **before.balanced}])
    member = SimpleNamespace(checkpoint=run, run=run)
    say_balance(member, before)
    weights[3] += 1
    with pytest.raises(DataError, match="other weights, or another num_samples, than when the run"):
        say_balance(member, plan(weights, 5, replacement=again))
