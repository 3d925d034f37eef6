"""Sums on a lattice: one result in any order, near the true sum, never silently wrong."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.errors import SpecError, WorkerError
from instep.sync.all_reduce import AllReduce
from instep.sync.generation import Generation
from instep.sync.lattice import WHOLE, Lattice, Report

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def gradients(parts, size, seed, dtype=torch.float32, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, generator=generator, dtype=torch.float64) * spread).to(dtype)
        for _ in range(parts)
    ]


def one_step(lattices, shares, dtype):
    """One agreement, where `shares` are the gradients of each rank: its result."""
    count = sum(map(len, shares))
    for attempt in range(2):
        sums: list[torch.Tensor] = []
        for lattice, own in zip(lattices, shares, strict=True):
            total = torch.zeros(len(shares[0][0]) if shares[0] else 1, dtype=WHOLE[dtype])
            for number, gradient in enumerate(own):
                lattice.begin_pass()
                lattice.add(0, gradient, 1 / count, total, number == 0)
            sums.append(total)
        reports = [lattice.report() for lattice in lattices]
        summed = Report(
            *([sum(each[0] for each in column)] for column in zip(*reports, strict=True))
        )
        misfits = lattices[0].misfits(summed)
        if not misfits:
            break
        assert attempt == 0, "it must fit after one repetition"
        top = max(lattice.peaks()[0] for lattice in lattices)
        for lattice in lattices:
            lattice.fit(misfits, [top])
            lattice.begin_step()
    agreed = torch.stack(sums).sum(0, dtype=WHOLE[dtype])
    finite = not any(report.not_finite[0] for report in reports)
    results = []
    for lattice in lattices:
        results.append(torch.empty(len(agreed), dtype=dtype))
        lattice.value(0, agreed, results[-1], finite=finite)
        lattice.learn(lattice.sizes())
        lattice.begin_step()
    assert all(torch.equal(results[0], r) or not finite for r in results)
    return results[0]


def dealt(parts, ranks, seed):
    """The parts among so many ranks, any which way; rank 0 has at least one."""
    draw = random.Random(seed)
    owners = [0, *(draw.randrange(ranks) for _ in parts[1:])]
    shares = [
        [p for p, owner in zip(parts, owners, strict=True) if owner == r] for r in range(ranks)
    ]
    for share in shares:
        draw.shuffle(share)
    return shares


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(TYPES),
    parts=st.integers(1, 9),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    growth=st.lists(st.sampled_from([1e-3, 0.5, 1.0, 3.0, 200.0]), min_size=1, max_size=4),
)
def test_steps_give_the_same_bits_however_their_passes_are_dealt(dtype, parts, ranks, seed, growth):
    one, many = [Lattice([torch.empty(50, dtype=dtype)], parts) for _ in range(2)], None
    one, many = one[:1], [Lattice([torch.empty(50, dtype=dtype)], parts) for _ in range(ranks)]
    for step, spread in enumerate(growth):
        own = gradients(parts, 50, seed + step, dtype, spread)
        together = one_step(one, [own], dtype)
        apart = one_step(many, dealt(own, ranks, seed), dtype)
        assert torch.equal(together, apart)
        assert {tuple(lattice.state().tolist()) for lattice in many} == {
            tuple(one[0].state().tolist())
        }


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("size", [0, 1, 7, 200_000])
def test_a_sum_is_as_near_to_the_true_one_as_its_type_tells(dtype, scale, size):
    if dtype == torch.float16 and scale == 1e-6:
        scale = 1e-3  # it knows nothing as small
    parts = gradients(8, size, 3, dtype, scale)
    lattice = Lattice([parts[0]], 8)
    result = one_step([lattice], [parts], dtype)
    wanted = torch.stack([p.double() for p in parts]).mean(0)
    near = {torch.float64: 1e-15, torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
    largest = float(torch.stack(parts).abs().max()) if size else 0.0
    assert (result.double() - wanted).abs().max().item() <= near[dtype] * largest if size else True


def test_the_error_is_about_that_of_adding_in_float32():
    lattice = Lattice([torch.empty(1000)], 8)
    for step in range(3):
        parts = gradients(8, 1000, step)
        result = one_step([lattice], [parts], torch.float32)
        plain = sum(part * (1 / 8) for part in parts)
        wanted = torch.stack([p.double() for p in parts]).mean(0)
        error, usual = ((each.double() - wanted).abs().max() for each in (result, plain))
        assert error < 2 * usual


def test_a_gradient_that_does_not_fit_is_told_and_fits_after_one_repetition():
    lattice = Lattice([torch.empty(4)], 1)
    one_step([lattice], [[torch.ones(4)]], torch.float32)
    total = torch.zeros(4, dtype=torch.int32)
    lattice.add(0, torch.full((4,), 1e6), 1.0, total, True)
    assert lattice.report().too_large == [1.0]
    lattice.begin_step()
    assert one_step([lattice], [[torch.full((4,), 1e6)]], torch.float32).tolist() == [1e6] * 4


def test_growth_by_less_than_four_fits_at_once():
    lattice = Lattice([torch.empty(2)], 4)
    for size in (1.0, 3.9, 15.0, 58.0):
        before = lattice.state().tolist()
        one_step([lattice], [[torch.full((2,), size)] * 4], torch.float32)
        if before[0] < 1 << 19:
            total = torch.zeros(2, dtype=torch.int32)
            lattice.add(0, torch.full((2,), size), 0.25, total, True)
            assert lattice.report().too_large == [0.0]
            lattice.begin_step()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70_000])
def test_a_gradient_that_is_not_finite_makes_no_number_of_all_and_the_lattice_stays(wrong, place):
    good = gradients(2, 80_000, 1)
    lattice = Lattice([good[0]], 3)
    one_step([lattice], [good], torch.float32)
    before = lattice.state()
    bad = good[0].clone()
    bad[place] = wrong
    assert one_step([lattice], [[good[1], bad]], torch.float32).isnan().all()
    assert torch.equal(lattice.state(), before)
    assert one_step([lattice], [good], torch.float32).isfinite().all()


def test_zero_is_exact_and_teaches_nothing():
    lattice = Lattice([torch.empty(3)], 2)
    assert one_step([lattice], [[torch.zeros(3)]], torch.float32).tolist() == [0.0] * 3
    assert torch.equal(lattice.state(), Lattice([torch.empty(3)], 2).state())


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e38, 3e38])
def test_the_smallest_and_the_largest_numbers_fit_too(size):
    lattice = Lattice([torch.empty(1)], 8)
    result = one_step([lattice], [[torch.full((1,), size)] * 8], torch.float32)
    assert result.item() == pytest.approx(torch.tensor(size).item(), rel=1e-6, abs=1e-38)


def test_what_it_has_learnt_survives_a_restart():
    first = Lattice([torch.empty(20)], 4)
    one_step([first], [gradients(4, 20, 0)], torch.float32)
    other = Lattice([torch.empty(20)], 4)
    other.load_state(first.state())
    next_step = gradients(4, 20, 1, spread=1.5)
    assert torch.equal(
        one_step([first], [next_step], torch.float32), one_step([other], [next_step], torch.float32)
    )


@pytest.mark.parametrize("times", [4.0, 1e3, 1e6, 1e12, 1e30])
def test_a_spike_is_forgotten(times):
    lattice = Lattice([torch.empty(200)], 4)
    usual = [gradients(4, 200, step) for step in range(4)]
    for parts in usual:
        one_step([lattice], [parts], torch.float32)
    one_step([lattice], [[part * times for part in usual[0]]], torch.float32)
    for parts in usual:
        result = one_step([lattice], [parts], torch.float32)
        wanted = torch.stack([p.double() for p in parts]).mean(0)
        assert (result.double() - wanted).abs().max() < 2e-4 * wanted.abs().max()


def test_after_a_tiny_gradient_a_usual_one_is_too_large_and_no_nan():
    lattice = Lattice([torch.empty(1)], 2)
    one_step([lattice], [[torch.full((1,), 1e-35)] * 2], torch.float32)
    assert one_step([lattice], [[torch.full((1,), 1e10)] * 2], torch.float32).item() == 1e10


def test_several_gradients_of_a_pass_are_judged_together():
    lattice = Lattice([torch.empty(2)], 1)
    one_step([lattice], [[torch.ones(2)]], torch.float32)
    total = torch.zeros(2, dtype=torch.int32)
    lattice.begin_pass()
    for number in range(20):  # each fits alone
        lattice.add(0, torch.ones(2), 1.0, total, number == 0)
    assert lattice.report().too_large == [1.0]


def test_room_that_was_made_in_a_step_that_did_not_happen_is_not_remembered():
    lattice = Lattice([torch.empty(2)], 1)
    one_step([lattice], [[torch.ones(2)]], torch.float32)
    before = lattice.state()
    lattice.fit([0], [1e9])
    assert torch.equal(lattice.state(), before)
    one_step([lattice], [[torch.full((2,), 1e9)]], torch.float32)
    assert not torch.equal(lattice.state(), before)


# ---- inside the strategy


def agreed_gradient(comm, values, attempts):
    """What rank `comm.rank` holds after agreeing on `values[rank]`, a gradient for each attempt."""
    weight = nn.Parameter(torch.zeros(3))
    strategy = AllReduce()
    strategy.start([weight], comm, Generation(notes=1, parts=comm.size))
    tries = 0
    for value in values[comm.rank]:
        tries += 1
        strategy.begin_pass(1 / comm.size, last=True)
        strategy.gradient(0, torch.full((3,), value))
        if strategy.exchange(torch.ones(1, dtype=torch.float64)) is not None:
            break
    assert tries == attempts
    strategy.hand_out()
    return strategy.apply(lambda: weight.grad.tolist())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_parameters_of_a_type_without_a_lattice_are_refused_in_one_sentence(dtype):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=dtype))]
    with pytest.raises(SpecError, match=rf"parameters of {dtype}, .*Make them one of torch\."):
        AllReduce().start(parameters, AloneComm(), Generation(notes=0, parts=2))


def test_the_first_step_runs_twice_on_every_rank():
    values = [[float(rank + 1)] * 3 for rank in range(3)]
    assert run_ranks(3, agreed_gradient, values, 2) == [[2.0] * 3] * 3


def test_a_step_that_is_not_the_same_when_computed_again_is_refused_everywhere():
    values = [[1.0, 1.0, 1.0], [1.0, 1e9, 1e9]]

    def body(comm):
        with pytest.raises(WorkerError, match=r"computed twice .* --check-determinism"):
            agreed_gradient(comm, values, 2)
        return True

    assert run_ranks(2, body) == [True, True]
