"""How far participants are apart, against the definition in plain PyTorch."""

import math

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.rounds.spread import Spread

SHAPES, WEIGHTS = [(30, 20), (7,)], [0.1, 0.2, 0.3, 0.4]


def ways(participant):
    generator = torch.Generator().manual_seed(participant)
    return [torch.randn(shape, generator=generator) + 0.5 for shape in SHAPES]


def predicted(participant):
    generator = torch.Generator().manual_seed(90 + participant)
    return torch.randn(6, 3, generator=generator, dtype=torch.float64).softmax(-1)


def measured(comm, *, codec="none", scale=1.0, predicts=True):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    strategy = make_strategy("diloco", {}, codec)
    strategy.start(parameters, comm, Generation(notes=0))
    strategy.begin_step(Attempt(0, 1, 1))
    for n in range(comm.rank, len(WEIGHTS), comm.size):
        strategy.begin_pass(WEIGHTS[n] / scale, last=False, unit=n)
        for slot, way in enumerate(ways(n)):
            strategy.gradient(slot, way)
        if predicts:
            strategy.predicts(predicted(n))
    strategy.exchange(torch.zeros(0, dtype=torch.float64))
    strategy.prepare(1, scale)
    assert strategy.spread is None  # the round has not happened
    strategy.hand_out()
    agreed = [p.grad.clone() * scale for p in parameters]
    strategy.apply(lambda: None)
    return strategy.spread, agreed


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("codec", "scale"), [("none", 1.0), ("none", 4.0), ("int4", 1.0)])
def test_distance_way_and_divergence_are_what_they_say(ranks, codec, scale):
    """From what was agreed on, also where a codec rounds that or not all samples count."""
    found = run_ranks(ranks, lambda comm: measured(comm, codec=codec, scale=scale))
    agreed = torch.cat([each.flatten() for each in found[0][1]]).double()
    square = sum(
        weight * (torch.cat([way.flatten() for way in ways(n)]).double() - agreed).square().sum()
        for n, weight in enumerate(WEIGHTS)
    )
    mean = sum(weight * predicted(n) for n, weight in enumerate(WEIGHTS))
    divergence = sum(
        weight * (predicted(n) * (predicted(n) / mean).log()).sum(-1).mean()
        for n, weight in enumerate(WEIGHTS)
    )
    wanted = math.sqrt(square), float(agreed.norm()), float(divergence)
    for spread, _ in found:
        assert spread == pytest.approx(wanted, rel=1e-6)
        assert spread.ratio == pytest.approx(wanted[0] / wanted[1])


def test_without_predictions_there_is_no_divergence():
    assert run_ranks(2, lambda comm: measured(comm, predicts=False))[0][0].divergence is None


def test_the_ratio_of_participants_that_come_back_to_where_they_began():
    assert Spread(2.0, 0.0, None).ratio == math.inf
    assert Spread(0.0, 0.0, None).ratio == 0.0
