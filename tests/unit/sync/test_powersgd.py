"""PowerSGD: as in a plain loop and in PyTorch's own hook; exact where theory says so."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from helpers import run_processes
from instep.comm.alone import AloneComm
from instep.comm.codecs.factor_kernels import multiply, orthonormalise
from instep.comm.codecs.powersgd import PowerSGD
from instep.comm.memory import run_ranks
from instep.errors import SpecError
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.reducers import Place
from instep.sync.reducers.powersgd import PowerSgd

SHAPES = [(40, 24), (24,), (12, 8, 3, 3), (64, 48), (3, 3), (), (30, 40)]
"""Two matrices, a convolution, and what is too small to travel in factors."""

BUCKETS = [[Place("wide", (30, 40)), Place("bias", (7,))], [Place("tall", (50, 20))]]


def drawn(rank, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(comm, steps, options, bucket_mb=0.002, change=lambda step, gradients: None):
    """What is agreed on in each step."""
    buckets = {"bucket_mb": bucket_mb, "encode_vectors": True}
    strategy = make_strategy("all_reduce", buckets, "powersgd", options)
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    strategy.start(parameters, comm, Generation(notes=1))
    results = []
    for step in range(1, steps + 1):
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1 / comm.size, last=True)
        gradients = drawn(comm.rank, step)
        change(step, gradients)
        for slot in reversed(range(len(SHAPES))):
            strategy.gradient(slot, gradients[slot])
        strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.hand_out()
        results.append(strategy.apply(lambda: [p.grad.clone() for p in parameters]))
    return results, strategy.own_state(), strategy.state()


def plain(size, steps, rank, start_after, right):
    """The paper's algorithm in float64, with these first right factors by slot."""
    errors = [[torch.zeros(s, dtype=torch.float64) for s in SHAPES] for _ in range(size)]
    results = []
    for step in range(1, steps + 1):
        given = [[g.double() / size for g in drawn(worker, step)] for worker in range(size)]
        agreed = []
        for slot, shape in enumerate(SHAPES):
            own = [given[w][slot] + errors[w][slot] for w in range(size)]
            if slot not in right or step <= start_after:
                agreed.append(sum(own))
                for worker in range(size):
                    errors[worker][slot] = torch.zeros(shape, dtype=torch.float64)
                continue
            matrices = [each.reshape(shape[0], -1) for each in own]
            q = torch.linalg.qr(right[slot]).Q
            p = torch.linalg.qr(sum(m @ q for m in matrices)).Q
            right[slot] = sum(m.T @ p for m in matrices)
            agreed.append((p @ right[slot].T).reshape(shape))
            for worker, m in enumerate(matrices):
                errors[worker][slot] = (m - p @ (p.T @ m)).reshape(shape)
        results.append(agreed)
    return results, [sum(each[slot] for each in errors) for slot in range(len(SHAPES))]


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_it_is_what_a_plain_loop_of_the_paper_gives(size, rank):
    options = {"rank": rank, "start_after": 2}
    _, _, state = trained(AloneComm(), 0, options)
    right = {int(n.split("/")[1]): q.double().T for n, q in state.items()}
    assert {0, 2, 3, 6} >= right.keys() >= {3, 6}
    wanted, left = plain(size, 12, rank, 2, right)
    ranks = run_ranks(size, trained, 12, options)
    for results, _, state in ranks:
        for step, (got, expected) in enumerate(zip(results, wanted, strict=True)):
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4), step
        for one, other in zip(results, ranks[0][0], strict=True):
            assert all(map(torch.equal, one, other))
        assert all(torch.equal(state[name], ranks[0][2][name]) for name in state)
    for slot, expected in enumerate(left):
        total = sum(own[f"residual/{slot}"].double() for _, own, _ in ranks)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_how_gradients_lie_in_buckets_changes_nothing_but_rounding():
    one, many = (
        run_ranks(2, trained, 6, {"rank": 2, "start_after": 0}, mb)[0][0] for mb in (8, 0.0001)
    )
    for got, other in zip(one, many, strict=True):
        for first, second in zip(got, other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_a_matrix_of_no_higher_rank_arrives_whole():
    def low_rank(_, gradients):
        generator = torch.Generator().manual_seed(4)  # the same columns on every rank
        columns = torch.randn(64, 2, generator=generator)
        gradients[3] = columns @ gradients[3][:2]

    whole = [sum(drawn(rank, 1)[3][:2] for rank in range(3)) / 3]
    columns = torch.randn(64, 2, generator=torch.Generator().manual_seed(4))
    for results, own, _ in run_ranks(3, trained, 1, {"rank": 4, "start_after": 0}, 8, low_rank):
        torch.testing.assert_close(results[0][3], columns @ whole[0], rtol=1e-5, atol=1e-5)
        assert own["residual/3"].abs().max() < 1e-5


def test_with_a_rank_as_large_as_the_matrices_all_travel_whole():
    for results, own, state in run_ranks(3, trained, 2, {"rank": 48, "start_after": 0}):
        for step, got in enumerate(results, 1):
            for slot, one in enumerate(got):
                mean = sum(drawn(rank, step)[slot] for rank in range(3)) / 3
                torch.testing.assert_close(one, mean)
        assert not state
        assert not any(bool(each.any()) for each in own.values())


def test_after_a_gradient_of_zeros_the_factors_begin_anew():
    def none_at_first(step, gradients):
        if step == 1:
            gradients[3].zero_()

    ranks = run_ranks(2, trained, 2, {"rank": 2, "start_after": 0}, 8, none_at_first)
    (first, second), _, _ = ranks[0]
    assert not first[3].any()
    assert torch.linalg.matrix_rank(second[3]) == 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_on_every_rank_and_is_gone_in_the_next_step(bad):
    def spoilt(step, gradients):
        if step == 2:
            gradients[3][5, 7] = bad

    for results, own, _ in run_ranks(2, trained, 3, {"rank": 2, "start_after": 0}, 8, spoilt):
        assert not results[1][3].isfinite().any()
        assert all(each.isfinite().all() for each in results[2])
        assert all(each.isfinite().all() for each in own.values())


def test_an_abandoned_step_changes_nothing():
    def body(comm):
        codec, layout = PowerSGD(rank=2, start_after=0), PowerSgd.layout(BUCKETS, 2, ())
        reducer = PowerSgd(codec, comm, layout)
        found = []
        for step in (1, 2, 2):
            flats = [
                torch.cat([g.flatten() for g in drawn(comm.rank, step, [p.shape for p in bucket])])
                for bucket in BUCKETS
            ]
            for number, flat in enumerate(flats):
                reducer.begin(number, flat, key=step)
            reducer.finish()
            if step == 1:
                reducer.apply()
            else:
                reducer.abandon()
            found.append((flats, reducer.own_state(), reducer.state()))
        (_, before, factors), (one, *_), (other, after, same) = found
        assert all(map(torch.equal, one, other))
        assert all(torch.equal(before[name], after[name]) for name in before)
        return all(torch.equal(factors[name], same[name]) for name in factors)

    assert run_ranks(2, body) == [True, True]


def test_rows_become_orthonormal_and_those_that_add_nothing_are_replaced():
    rows = torch.randn(5, 100)
    rows[2] = 3 * rows[0] - rows[1]
    rows[4] = 0
    spare = torch.randn(5, 100)
    made = rows.clone()
    orthonormalise(made.numpy(), spare.numpy())
    torch.testing.assert_close(made @ made.T, torch.eye(5), rtol=0, atol=1e-6)
    torch.testing.assert_close((rows[:2] @ made[:2].T) @ made[:2], rows[:2], rtol=1e-5, atol=1e-5)
    zeros = rows.clone()
    orthonormalise(zeros.numpy(), spare[:0].numpy())
    assert not zeros[[2, 4]].any()
    torch.testing.assert_close(
        zeros[[0, 1, 3]] @ zeros[[0, 1, 3]].T, torch.eye(3), atol=1e-6, rtol=0
    )


def test_the_product_is_that_of_torch():
    left, right, out = torch.randn(4, 30), torch.randn(4, 50), torch.empty(30, 50)
    multiply(left.numpy(), right.numpy(), out.numpy())
    torch.testing.assert_close(out, left.T @ right)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "sync.codec_options.rank = 0: needs a whole number, 1 or more"),
        ({"rank": True}, "rank = True"),
        ({"start_after": -1}, "start_after = -1: needs a whole number, 0 or more"),
        ({"block": 64}, "powersgd has no option 'block'. Known: rank, start_after."),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(SpecError) as refused:
        make_strategy("all_reduce", {}, "powersgd", options)
    assert words in str(refused.value)


_KEPT = []
"""Wrapped models, until their process is killed. The end of one ends its group: it waits for gloo's
threads while no other may run Python, and one of them may want to, to let go of what the hook has
left (torch 2.13: neither returns)."""


def beside_the_hook(comm, folder):
    """The same gradients through PyTorch's hook, in one bucket, and here; in each step, both."""
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.FileStore(str(folder / "hook"), comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    model = nn.Linear(40, 30, bias=False)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=100)
    state = hook.PowerSGDState(
        None, matrix_approximation_rank=3, start_powerSGD_iter=3, min_compression_rate=1
    )
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    places = [[Place("weight", (30, 40))]]
    ours = PowerSgd(PowerSGD(rank=3, start_after=0), comm, PowerSgd.layout(places, comm.size, ()))
    both = []
    for step in range(10):
        gradient = drawn(comm.rank, step, [(30, 40)])[0]
        begins = bool(state.q_memory_dict)
        if begins and not both:  # from here on with the factor and the error that it has
            right = next(iter(state.q_memory_dict.values())).view(40, 3).T.contiguous()
            ours.load_state({"powersgd/weight": right})
            left = next(iter(state.error_dict.values())).view(30, 40) / comm.size
            ours._layout.fill(ours.carried, comm.rank, {"residual/weight": left})
        model.zero_grad()
        (wrapped(torch.eye(40)) * gradient.T).sum().backward()
        if begins:
            flat = (gradient / comm.size).flatten()
            ours.begin(0, flat, key=step + 1)
            ours.finish()
            ours.apply()
            both.append((model.weight.grad.clone(), flat.view(30, 40)))
    _KEPT.append(wrapped)
    return [(one.numpy(), other.numpy()) for one, other in both]


@pytest.mark.process
def test_it_is_what_pytorchs_own_hook_gives(tmp_path):
    one, other = run_processes(2, beside_the_hook, tmp_path, tmp_path)
    assert len(one) >= 5
    for (hooked, ours), (_, theirs) in zip(one, other, strict=True):
        assert (ours == theirs).all()
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(hooked), rtol=1e-4, atol=1e-4)
