"""Sums of several workers: the same bits however micro-batches are dealt, and noise added once."""

from __future__ import annotations

import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.privacy.agreement import PrivateAllReduce
from instep.privacy.grid import Grid
from instep.privacy.sums import PrivateSums
from instep.records import Attempt
from instep.sync.generation import Generation

PARTS, SECRET = 7, bytes(range(32))


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(4))]


def sums_of_part(part):
    generator = torch.Generator().manual_seed(part)
    return [
        torch.randint(-(2**20), 2**20, each.shape, generator=generator, dtype=torch.int32)
        for each in parameters()
    ]


def released(comm, noise=1.0, empty=False):
    """What one rank is handed out for commit 3, of which it computed its share of the parts."""
    own, told = parameters(), []
    grid = Grid(1.0, 19, 60)
    strategy = PrivateAllReduce(
        lambda slots: PrivateSums(slots, grid, noise, 40.0, SECRET),
        lambda commit, tag: told.append((commit, tag)),
    )
    notes = torch.zeros(2, dtype=torch.float64)
    strategy.start(own, comm, Generation(notes=2, parts=PARTS, memory=None, at=Attempt(0, 2, 1)))
    strategy.begin_step(Attempt(0, 3, 1))
    mine = [part for part in range(PARTS) if part % comm.size == comm.rank]
    for part in mine:
        strategy.begin_pass(1.0, last=part == mine[-1])
        for slot, each in enumerate(sums_of_part(part)):
            strategy.gradient(slot, torch.zeros_like(each) if empty else each)
    strategy.exchange(notes)
    strategy.hand_out()
    found = [each.grad.clone() for each in own]
    strategy.apply(lambda: None)
    return found, told


def test_the_bits_are_those_of_one_worker_on_two_three_and_seven():
    ((alone, told),) = run_ranks(1, released)
    assert len(told) == 1
    for ranks in (2, 3, 7):
        for found, written in run_ranks(ranks, released):
            assert all(map(torch.equal, found, alone))
            assert written == told  # by each rank: another may not live to


def test_noise_is_added_once_whatever_the_number_of_workers_and_to_an_empty_step_too():
    grid = Grid(1.0, 19, 60)
    expected = grid.sensitivity * grid.unit / 40.0
    for ranks in (1, 3):
        (found, _), *_ = run_ranks(ranks, lambda comm: released(comm, noise=1.0, empty=True))
        drawn = torch.cat([each.flatten() for each in found])
        assert (drawn != 0).all()
        assert 0.5 * expected < drawn.std() < 1.7 * expected


def test_a_step_is_the_sum_of_its_parts_but_for_the_noise():
    ((found, _),) = run_ranks(1, lambda comm: released(comm, noise=1e-9))
    grid = Grid(1.0, 19, 60)
    for slot, each in enumerate(found):
        whole = sum(sums_of_part(part)[slot].double() for part in range(PARTS))
        torch.testing.assert_close(each.double(), whole * grid.unit / 40.0, rtol=1e-6, atol=1e-9)
