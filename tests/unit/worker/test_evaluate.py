"""A validation has the same bits whoever computes which of its batches."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.data.loader import Loader
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.worker.passes.evaluate import Sharing, evaluate

SIZES = [3, 0, 20, 14]
"""Samples of participants, of which one has none."""


def figures(comm, speeds=None, workers=None, sizes=()):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(37, 6, generator=generator)
    recipe = Recipe(
        model=nn.Linear(6, 2),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=[0],
        validate=TensorDataset(inputs, inputs.sin()[:, :2]),
        metrics={"distance": lambda outputs, target: (outputs - target).abs().mean()},
    )
    with torch.no_grad():
        for parameter in recipe.model.parameters():
            parameter.fill_(0.3)
    loader = Loader(recipe.validate, seed=0, shuffle=False, processes=0)
    taken = []
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    measure = forward.measure

    def counted(batch, samples):
        taken.append(samples)
        return measure(batch, samples)

    forward.measure = counted
    try:
        return evaluate(forward, loader, 37, 5, comm, Sharing(speeds, workers), sizes=sizes), sum(
            taken
        )
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("speeds", "counts"),
    [
        (None, [10, 15, 12]),  # 8 batches of 5, the last of 2
        ((1, 0.2, 1), [20, 0, 17]),
        ((0.01, 1, 1), [0, 20, 17]),
    ],
)
def test_a_slow_worker_validates_less_and_the_figures_are_those_of_one(speeds, counts):
    whole, samples = figures(AloneComm())
    assert samples == 37
    results = run_ranks(3, lambda comm: figures(comm, speeds))
    assert [taken for _, taken in results] == counts
    for values, _ in results:
        assert values == whole


def test_the_means_are_those_of_plain_torch_over_all_samples_although_the_last_batch_is_smaller():
    inputs = torch.randn(37, 6, generator=torch.Generator().manual_seed(1))
    target = inputs.sin()[:, :2]
    outputs = (inputs.sum(dim=1, keepdim=True) * 0.3 + 0.3).expand(37, 2)
    found, _ = figures(AloneComm())
    for name, each in (("loss", (outputs - target) ** 2), ("distance", (outputs - target).abs())):
        mean = each.double().mean()
        assert found.metrics[name] == pytest.approx(float(mean), rel=1e-6)
        by_batch = torch.stack([part.double().mean() for part in each.split(5)]).mean()
        assert abs(float(by_batch - mean)) > 1e-3  # a mean of the batches' means is another


def test_each_participant_has_the_means_of_its_own_samples_whoever_computes_them():
    inputs = torch.randn(37, 6, generator=torch.Generator().manual_seed(1))
    outputs = (inputs.sum(dim=1, keepdim=True) * 0.3 + 0.3).expand(37, 2)
    error = (outputs - inputs.sin()[:, :2]).double()
    whole, samples = figures(AloneComm(), sizes=SIZES)
    assert samples == 37
    plain, _ = figures(AloneComm())
    assert whole.metrics == pytest.approx(plain.metrics, rel=1e-6)
    assert plain.participants == {}
    for name, each in (("loss", error**2), ("distance", error.abs())):
        means = [float(part.mean()) for part in each.split(SIZES)]
        assert whole.participants[name] == pytest.approx(means, rel=1e-6, nan_ok=True)
        assert math.isnan(means[1])
    for values, _ in run_ranks(3, lambda comm: figures(comm, (1, 0.2, 1), sizes=SIZES)):
        assert str(values) == str(whole)  # NaN is no other NaN


def test_servers_validate_nothing_and_have_the_figures_too():
    whole, _ = figures(AloneComm())
    results = run_ranks(4, lambda comm: figures(comm, None, 2))
    assert [taken for _, taken in results] == [20, 17, 0, 0]
    assert all(values == whole for values, _ in results)
