"""A WeightedRandomSampler of the user's is planned by its weights, or refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import instep
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.worker.reading.planned_data import plan_data


def plan(weights):
    data = TensorDataset(torch.zeros(len(weights), 1), torch.zeros(len(weights), 1))
    sampler = WeightedRandomSampler(weights, len(weights))
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    recipe = instep.Recipe(
        model=nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD, train=loader
    )
    return plan_data(JobSpec(recipe="a.py:recipe", seed=3), recipe)


def test_each_sample_comes_as_often_as_its_weight_says_to_within_one():
    weights = [0.0, 1.0, 1.0, 2.0, 4.0, 0.0, 8.0, 0.0]
    order = plan(weights).how.order
    taken = np.concatenate([order.indices(e, 0, order.positions(e)) for e in range(4)])
    wished = 4 * 8 * np.array(weights) / sum(weights)
    found = np.bincount(taken, minlength=8)
    assert (np.abs(found - wished) < 1).all()
    assert not found[np.array(weights) == 0].any()


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(wrong):
    with pytest.raises(RecipeError, match="with a weight below 0 or not finite"):
        plan([1.0, 2.0, wrong, 1.0])


def test_weights_of_which_none_is_above_0_are_refused():
    with pytest.raises(RecipeError, match="or with no weight above 0"):
        plan([0.0, 0.0])
