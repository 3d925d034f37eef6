"""How a round ends, compared with PyTorch's optimizer and with the paper's lines."""

import pytest
import torch
from torch import nn

from instep.errors import SpecError
from instep.sync.base import make_strategy
from instep.sync.rounds.outer import Adaptive, Momentum, Outer


def rounds(outer, count=5):
    """The parameter after each round, of means drawn near it."""
    generator = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.ones(40, dtype=torch.float64))
    for _ in range(count):
        away = torch.randn(40, generator=generator, dtype=torch.float64)
        parameter.grad = away * torch.arange(40) / 40
        yield parameter, parameter.grad.clone()
        outer.replace([parameter])
        with torch.no_grad():
            parameter -= parameter.grad


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_pytorch(nesterov):
    twin = nn.Parameter(torch.ones(40, dtype=torch.float64))
    optimizer = torch.optim.SGD([twin], lr=0.7, momentum=0.9, nesterov=nesterov)
    for parameter, back in rounds(Outer(Momentum(0.7, 0.9, nesterov=nesterov))):
        torch.testing.assert_close(parameter, twin, rtol=1e-12, atol=0)
        twin.grad = back
        optimizer.step()


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_adaptive_rules_are_those_of_the_paper(rule):
    """Algorithm 2 of Reddi et al. 2021, element by element in Python's numbers."""
    x = [1.0] * 40
    m, v = [0.0] * 40, [1e-3**2] * 40
    for parameter, back in rounds(Outer(Adaptive(rule, 0.1, 0.9, 0.99, 1e-3))):
        torch.testing.assert_close(parameter.tolist(), x, rtol=1e-11, atol=1e-13)
        for n, delta in enumerate((-back).tolist()):
            m[n] = 0.9 * m[n] + (1 - 0.9) * delta
            if rule == "adagrad":
                v[n] = v[n] + delta**2
            elif rule == "yogi":
                sign = (v[n] > delta**2) - (v[n] < delta**2)
                v[n] = v[n] - (1 - 0.99) * delta**2 * sign
            else:
                v[n] = 0.99 * v[n] + (1 - 0.99) * delta**2
            x[n] = x[n] + 0.1 * m[n] / (v[n] ** 0.5 + 1e-3)


@pytest.mark.parametrize("rule", [Momentum(0.7, 0.9), Adaptive("yogi", 0.1, 0.9, 0.99, 1e-3)])
def test_what_a_rule_keeps_is_taken_up_by_another(rule):
    one, other = Outer(rule), Outer(rule)
    (parameter, back), *_ = list(rounds(one, 3))
    other.load_state(one.state())
    ways = []
    for outer in (one, other):
        parameter.grad = back.clone()
        outer.replace([parameter])
        ways.append(parameter.grad)
    assert torch.equal(*ways)
    assert not torch.equal(ways[0], back)


def test_a_parameter_of_half_precision_is_moved_by_moments_in_float32():
    outer, parameter = Outer(Momentum(1.0, 0.9)), nn.Parameter(torch.ones(2).bfloat16())
    for _ in range(2):
        parameter.grad = torch.ones(2).bfloat16()
        outer.replace([parameter])
    assert parameter.grad.dtype == torch.bfloat16
    assert outer.state()["0/momentum"].tolist() == [pytest.approx(1.9)] * 2


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fedprox", {"mu": -1}, "sync.options.mu = -1: needs a number of at least 0."),
        ("fedopt", {"tau": 0}, "sync.options.tau = 0: needs a number of at least 1e-12."),
        ("fedopt", {"outer_beta2": 1}, "needs a number of at least 0 and below 1."),
        ("diloco", {"outer_lr": True}, "sync.options.outer_lr = True: needs a number"),
    ],
)
def test_an_option_that_is_no_such_number_is_refused(name, options, sentence):
    with pytest.raises(SpecError) as refused:
        make_strategy(name, options)
    assert sentence in str(refused.value)
