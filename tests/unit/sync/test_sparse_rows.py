"""Optimizers of sparse gradients move the rows of a batch, also those whose gradient is zero."""

import copy

import pytest
import torch
from torch import nn

from instep.comm.memory import MemoryComm, run_ranks
from instep.engine.gradients import Gradients
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import make_strategy
from instep.sync.delayed import Delayed
from instep.sync.gathering import sparse_mark, sparse_of
from instep.sync.generation import Generation
from instep.sync.sparse_rows import SparseRows

STEPS, PARTS, SIZE = 5, 3, 2


class Net(nn.Module):
    """Some words count nothing in the loss, but are in the batch; others are never in it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.often = (nn.Embedding(12, 3, sparse=True).double() for _ in range(2))

    def forward(self, step, part):
        draw = torch.Generator().manual_seed(10 * step + part)
        rows = torch.randint(8, (SIZE,), generator=draw)
        counts = torch.zeros(SIZE) if step == 3 else (rows % 3 > 0).double()
        found = (self.words(rows) * counts.unsqueeze(1)).square().sum(1)
        if part == 1:  # of which only one rank has a gradient
            found = found + self.often(rows).sin().sum(1)
        return found.mean()


def trained(comm, parts, start, make):
    """In two generations; the second takes up what the first left."""
    model = Net()
    model.load_state_dict(start)  # ranks are threads, which draw from one generator
    parameters = list(model.parameters())
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
    strategy = make()
    strategy.last = STEPS
    strategy.start(parameters, comm, Generation(notes=1, parts=parts))
    gradients = Gradients(parameters, lambda *given: strategy.gradient(*given))
    for step in range(1, STEPS + 1):
        if step == 4:
            before, strategy = strategy, make()
            strategy.last = STEPS
            strategy.load_state(before.state())
            strategy.load_own(before.own_state())
            strategy.start(parameters, comm, Generation(notes=1, parts=parts, at=Attempt(0, 3, 2)))
        agreed = None
        while agreed is None:
            strategy.begin_step(Attempt(0, step, 1))
            mine = range(comm.rank, PARTS, comm.size)
            for part in mine:
                strategy.begin_pass(1 / PARTS, last=part == mine[-1], unit=part)
                model(step, part).backward()
            agreed = strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.prepare(step, 1.0)
        strategy.hand_out()
        strategy.apply(optimizer.step)
    gradients.close()
    return copy.deepcopy(model.state_dict())


def plain(start, late):
    """The loop of one process; each gradient is applied so many steps late, but the last ones."""
    model = Net()
    model.load_state_dict(start)
    parameters, waiting, moved = list(model.parameters()), [], []
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
    for step in range(1, STEPS + 1):
        before = model.words.weight.detach().clone()
        optimizer.zero_grad()
        (sum(model(step, part) for part in range(PARTS)) / PARTS).backward()
        waiting.append([parameter.grad for parameter in parameters])
        while len(waiting) > (late if step < STEPS else 0):
            for parameter, gradient in zip(parameters, waiting.pop(0), strict=True):
                parameter.grad = gradient
            optimizer.step()
        moved.append((model.words.weight - before).abs().amax(1).ne(0))
    assert moved[2 + late].any()  # by the step in which every gradient is zero
    return model.state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [0, PARTS])
@pytest.mark.parametrize("make", [AllReduce, Delayed])
def test_rows_whose_gradient_is_zero_are_moved_as_in_a_plain_loop(ranks, parts, make):
    start = copy.deepcopy(Net().state_dict())
    wanted = plain(start, late=make is Delayed)
    for found in run_ranks(ranks, trained, parts, start, make):
        for name, value in wanted.items():
            exact = {"rtol": 1e-12, "atol": 1e-12} if not parts else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(found[name], value, **exact, msg=name)
            assert torch.equal(found[name][8:], start[name][8:])


def by_voters(start, momentum):
    """One process, one voter after the other; every momentum is as sparse as its gradients."""
    model = Net().float()
    model.load_state_dict(start)
    parameters = list(model.parameters())
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
    memory = [[None] * len(parameters) for _ in range(PARTS)]
    for step in range(1, STEPS + 1):
        votes = [[] for _ in parameters]
        for part in range(PARTS):
            model.zero_grad()
            (model(step, part).float() / PARTS).backward()
            for slot, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    before = memory[part][slot] if momentum else None
                    now = parameter.grad if before is None else parameter.grad + before * momentum
                    memory[part][slot] = now = now.coalesce()
                    votes[slot].append(now.sign())
        for parameter, each in zip(parameters, votes, strict=True):
            parameter.grad = sum(each[1:], each[0]).coalesce().sign() if each else None
        optimizer.step()
    return model.state_dict()


def voted(comm, start, momentum):
    model = Net().float()
    model.load_state_dict(start)
    parameters = list(model.parameters())
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
    strategy = make_strategy("sign_vote", {"momentum": momentum})
    strategy.start(parameters, comm, Generation(notes=0))
    gradients = Gradients(parameters, strategy.gradient)
    for step in range(1, STEPS + 1):
        strategy.begin_step(Attempt(0, step, 1))
        for part in range(comm.rank, PARTS, comm.size):
            strategy.begin_pass(1 / PARTS, last=False, unit=part)
            model(step, part).float().backward()
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        strategy.apply(optimizer.step)
    gradients.close()
    return model.state_dict()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rows_of_voters_are_moved_as_in_a_plain_loop_over_them(ranks, momentum):
    start = copy.deepcopy(Net().float().state_dict())
    wanted = by_voters(start, momentum)
    for found in run_ranks(ranks, voted, start, momentum):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_sum_of_a_sparse_gradient_and_a_dense_one_is_dense_as_in_a_plain_loop():
    """Such as those of an embedding whose weight is an output layer's too, in some passes."""

    def body(comm):
        table, strategy = nn.Parameter(torch.zeros(4, 2)), AllReduce()
        strategy.start([table], comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        rows = torch.sparse_coo_tensor(
            [[comm.rank]], torch.ones(1, 2), (4, 2), check_invariants=True
        )
        given = [rows, torch.ones(4, 2), rows] if comm.rank == 1 else [rows]
        for gradient in given:
            strategy.begin_pass(1.0, last=False)
            strategy.gradient(0, gradient.clone())
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        return table.grad

    for found in run_ranks(3, body):
        assert not found.is_sparse
        assert found[:, 0].tolist() == [2.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4095])
def test_marks_tell_whether_all_were_sparse(ranks):
    one = torch.tensor(sparse_mark(0.0))
    assert one.dtype == torch.float32  # as in the notes of a bucket
    assert sparse_of([0.0, float(one * ranks), float(one * (ranks - 1)) + 1.0, ranks]) == [1]


def test_dense_models_note_nothing(monkeypatch):
    monkeypatch.setattr(SparseRows, "_of", None)

    def body(comm):
        weight, strategy = nn.Parameter(torch.zeros(4, 2)), AllReduce()
        strategy.start([weight], comm, Generation(notes=0))
        monkeypatch.setattr(strategy._sparse_rows, "add", None)
        strategy.begin_pass(0.5, last=True)
        strategy.gradient(0, torch.ones(4, 2))
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        return weight.grad

    assert all(torch.equal(found, torch.ones(4, 2)) for found in run_ranks(2, body))


class Counted(MemoryComm):
    """Counts the bytes of sums."""

    summed = 0

    def all_reduce(self, tensor):
        self.summed += tensor.numel() * tensor.element_size()
        return super().all_reduce(tensor)


def test_sparse_gradients_cost_four_bytes_a_row_beside_their_values():
    def body(comm):
        comm.__class__ = Counted
        table, strategy = nn.Parameter(torch.zeros(1000, 3)), AllReduce()
        strategy.start([table], comm, Generation(notes=0))
        begin = comm.summed
        strategy.begin_pass(0.5, last=True)
        rows = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (1000, 3), check_invariants=True)
        strategy.gradient(0, rows)
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        return comm.summed - begin

    mark_bytes = 4
    values_and_rows = 4 * (3 * 1000) + 4 * 1000
    assert run_ranks(2, body) == [values_and_rows + mark_bytes] * 2
    assert AllReduce.price(values_and_rows, 2).sent_bytes == values_and_rows  # a ring of two
