"""Deep gradient compression: as in a plain loop of the paper, and SGD where all values are sent."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from instep.comm.codecs.dgc import DGC
from instep.comm.codecs.top_k import TopK
from instep.comm.memory import run_ranks
from instep.engine.gradients import Gradients
from instep.errors import RecipeError, SpecError
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.worker.loop.momentum import move_momentum

COUNT = 9000
"""Three chunks."""


def drawn(rank, step):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(comm, steps, options, nesterov):
    """What is agreed on in each step."""
    parameter = Parameter(torch.zeros(COUNT))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
    strategy = make_strategy("all_reduce", {}, "dgc", options)
    move_momentum(optimizer, strategy, "dgc")
    strategy.start([parameter], comm, Generation(notes=1))
    results = []
    for step in range(1, steps + 1):
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1 / comm.size, last=True)
        strategy.gradient(0, drawn(comm.rank, step))
        strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.hand_out()
        results.append(strategy.apply(parameter.grad.clone))
    return results, strategy.own_state()


def rounded(values, density):
    """What `top_k` would send of them."""
    codec = TopK(density=density)
    payload = torch.zeros(codec.size(COUNT), dtype=torch.uint8)
    codec.encode(values, payload, key=0)
    codec.add_into(sent := torch.zeros(COUNT), payload)
    return sent


def plain(size, steps, densities, nesterov, clip):
    """The paper's algorithm in one process: the sum in each step, and those of u and v."""
    u, v = ([torch.zeros(COUNT) for _ in range(size)] for _ in range(2))
    results = []
    for step in range(1, steps + 1):
        total = torch.zeros(COUNT)
        for worker in range(size):
            g = drawn(worker, step) / size
            g = g * min(1.0, clip / size**0.5 / float(g.norm())) if clip else g
            u[worker] = 0.9 * (u[worker] + g) if nesterov else 0.9 * u[worker] + g
            v[worker] = v[worker] + u[worker] + (g if nesterov else 0)
            sent = rounded(v[worker], densities(step))
            v[worker] = v[worker] - sent
            u[worker] = u[worker] * (sent == 0)
            total += sent
        results.append(total)
    return results, sum(u), sum(v)


@pytest.mark.parametrize(
    ("size", "nesterov", "clip", "warm_up"),
    [(1, False, 0.0, 0), (3, False, 0.0, 8), (3, True, 0.0, 0), (2, False, 3.0, 4)],
)
def test_it_is_what_a_plain_loop_of_the_paper_gives(size, nesterov, clip, warm_up):
    def densities(step):
        stage = 4 if step > warm_up else (step - 1) // (warm_up // 4)
        return 0.01 if stage == 4 else 0.01 ** ((stage + 1) / 5)

    wanted, u, v = plain(size, 20, densities, nesterov, clip)
    options = {"density": 0.01, "warm_up": warm_up, "clip": clip}
    ranks = run_ranks(size, trained, 20, options, nesterov)
    for results, _ in ranks:
        assert all(map(torch.equal, results, ranks[0][0]))
        for got, expected in zip(results, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, expected in (("momentum", u), ("residual", v)):
        total = sum(own[f"{name}/0"] for _, own in ranks)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_the_density_falls_by_the_same_factor_in_each_stage():
    codec = DGC(density=0.001, warm_up=400)
    found = [codec.densities[codec.stage(step)] for step in (1, 100, 101, 201, 301, 400, 401, 9999)]
    wanted = [0.251, 0.251, 0.063, 0.0158, 0.00398, 0.00398, 0.001, 0.001]
    assert found == pytest.approx(wanted, rel=0.01)


MODEL = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
ROWS, GOALS = torch.randn(12, 6), torch.randn(12, 3)


def sgd(model, nesterov):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)


def of_three(comm, nesterov):
    model, strategy = copy.deepcopy(MODEL), AllReduce(codec=DGC(density=1))
    optimizer, parameters = sgd(model, nesterov), list(model.parameters())
    move_momentum(optimizer, strategy, "dgc")
    strategy.start(parameters, comm, Generation(notes=0))
    gradients = Gradients(parameters, strategy.gradient)
    mine = slice(4 * comm.rank, 4 * comm.rank + 4)
    for step in range(1, 31):
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1 / 3, last=True)
        nn.functional.mse_loss(model(ROWS[mine]), GOALS[mine]).backward()
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        strategy.apply(optimizer.step)
    gradients.close()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_all_values_it_is_sgd_with_momentum(nesterov):
    alone = copy.deepcopy(MODEL)
    optimizer = sgd(alone, nesterov)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(ROWS), GOALS).backward()
        optimizer.step()
    for parameters in run_ranks(3, of_three, nesterov):
        for one, other in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.AdamW(p), "takes the momentum of torch.optim.SGD, .* is AdamW"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), "without dampening"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "momentum": 0.5}]),
            "one momentum",
        ),
    ],
)
def test_an_optimizer_whose_momentum_it_cannot_take_is_refused(optimizer, words):
    made = optimizer([Parameter(torch.zeros(2)), Parameter(torch.zeros(2))])
    with pytest.raises(RecipeError, match=words):
        move_momentum(made, AllReduce(codec=DGC()), "dgc")
    move_momentum(made, AllReduce(), "none")  # others may have any


def test_momentum_that_comes_back_is_refused():
    optimizer = torch.optim.SGD([Parameter(torch.zeros(2))], momentum=0.9)
    strategy = AllReduce(codec=DGC())
    move_momentum(optimizer, strategy, "dgc")
    assert strategy.codec.momentum == 0.9
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.8  # as OneCycleLR does
    with pytest.raises(RecipeError, match="momentum was set again"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0}, "sync.codec_options.density = 0: needs a number from 1/4096"),
        ({"warm_up": 1.5}, "sync.codec_options.warm_up = 1.5: needs a whole number"),
        ({"clip": -1}, "sync.codec_options.clip = -1: needs a number"),
        ({"momentum": 0.9}, "dgc has no option 'momentum'"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(SpecError) as refused:
        make_strategy("all_reduce", {}, "dgc", options)
    assert words in str(refused.value)
