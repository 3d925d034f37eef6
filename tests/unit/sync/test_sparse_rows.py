"""Optimizers of sparse gradients move the rows of a batch, also those whose gradient is zero."""

import copy

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.worker.step.gradients import Gradients

STEPS, PARTS, SIZE = 4, 3, 2


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


def trained(comm, parts, start):
    model = Net()
    model.load_state_dict(start)  # ranks are threads, which draw from one generator
    parameters = list(model.parameters())
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
    strategy = AllReduce()
    strategy.start(parameters, comm, notes=1, parts=parts)
    gradients = Gradients(parameters, strategy.gradient)
    for step in range(1, STEPS + 1):
        agreed = None
        while agreed is None:
            strategy.begin_step(Attempt(0, step, 1))
            mine = range(comm.rank, PARTS, comm.size)
            for part in mine:
                strategy.begin_pass(1 / PARTS, last=part == mine[-1], unit=part)
                model(step, part).backward()
            agreed = strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.hand_out()
        strategy.apply(optimizer.step)
    gradients.close()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [0, PARTS])
def test_rows_whose_gradient_is_zero_are_moved_as_in_a_plain_loop(ranks, parts):
    wanted = Net()
    start = copy.deepcopy(wanted.state_dict())
    optimizer = torch.optim.SparseAdam(wanted.parameters(), lr=0.1)
    moved = []
    for step in range(1, STEPS + 1):
        before = wanted.words.weight.detach().clone()
        optimizer.zero_grad()
        (sum(wanted(step, part) for part in range(PARTS)) / PARTS).backward()
        optimizer.step()
        moved.append((wanted.words.weight - before).abs().amax(1).ne(0))
    assert moved[2].any()  # the step in which every gradient is zero
    for found in run_ranks(ranks, trained, parts, start):
        for name, value in wanted.state_dict().items():
            exact = {"rtol": 1e-12, "atol": 1e-12} if not parts else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(found[name], value, **exact, msg=name)
            assert torch.equal(found[name][8:], start[name][8:])
