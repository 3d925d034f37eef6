"""The norm of a gradient has the same bits whoever holds which part, and is that of torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.sync.norm import BLOCK, blocks, factor, norm, squares, summed


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parts_have_the_squares_of_the_whole_to_the_bit(threads, dtype):
    whole = torch.randn(9 * BLOCK + 780, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = squares([whole.view(3, -1)])
    assert len(wanted) == blocks(len(whole)) == 10
    for cut in (BLOCK, 4 * BLOCK, 9 * BLOCK):
        room = torch.empty(len(whole) + 3, dtype=dtype)[3:]  # elsewhere in memory, aligned less
        room.copy_(whole)
        found = torch.cat([squares([room[:cut]]), squares([room[cut:].clone()])])
        assert torch.equal(found, wanted)


def test_it_is_the_norm_of_torch_to_rounding_and_clips_as_torch_does():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [p.grad.clone() for p in model.parameters()]
    found = norm(squares(gradients).tolist())
    by = factor(found, 0.5)
    assert found == pytest.approx(
        float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-6
    )
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient * by, parameter.grad, rtol=1e-6, atol=0)
    assert factor(found, 2 * found) == 1.0


@given(st.lists(st.lists(st.floats(min_value=0, max_value=1e300), max_size=9), max_size=4))
def test_a_few_sums_stand_for_all_squares_to_the_bit(servers):
    every = [square for squares in servers for square in squares]
    few = [summed(squares) for squares in servers]
    assert norm(part for parts in few for part in parts) == norm(every)
    assert all(math.fsum(parts) == math.fsum(own) for parts, own in zip(few, servers, strict=True))


def test_there_are_few_of_them_for_a_gradient_of_two_billion_elements():
    exponents = 100 * torch.randn(130_000, generator=torch.Generator().manual_seed(3))
    assert 2 < len(summed(exponents.double().exp2_().tolist())) < 50
    assert summed([]) == summed([0.0]) == []
    assert summed([1e308, 1e308]) == summed([math.inf, 2.0]) == [math.inf]
    assert math.isnan(*summed([2.0, math.nan]))


def test_of_nothing_it_is_zero_and_of_what_is_no_number_none():
    assert norm(squares([]).tolist()) == norm(squares([torch.zeros(0)]).tolist()) == 0.0
    assert norm(squares([torch.tensor([math.inf, 1.0])]).tolist()) == math.inf
    assert math.isnan(norm(squares([torch.tensor([math.nan]), torch.ones(2)]).tolist()))
    assert norm([1e308, 1e308]) == math.inf
    assert math.isnan(factor(math.nan, 1.0))
    assert factor(math.inf, 1.0) == 0.0
