"""What one rank alone has goes to the rank that writes checkpoints, and to no other."""

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.engine.state.own_state import OwnState
from instep.engine.turns import TurnState
from instep.records import Law

SIZE = 1000


class Counting:
    """A group that counts the numbers that this rank adds up."""

    def __init__(self, comm):
        self._comm, self.reduced = comm, 0

    def all_reduce(self, tensor):
        self.reduced += tensor.numel()
        return self._comm.all_reduce(tensor)

    def __getattr__(self, name):
        return getattr(self._comm, name)


class Remembers:
    """Each rank has the state of two participants, and every rank a part of the residual."""

    laws = dict.fromkeys(["residual", *(f"kept-{n}" for n in range(6)), "nowhere"], Law.SUM)

    def __init__(self, comm):
        self._comm = comm

    def own_state(self):
        mine = range(self._comm.rank, 6, self._comm.size)
        kept = {n: torch.full((SIZE,), n + 1 if n in mine else 0) for n in range(6)}
        return {
            "residual/0": torch.full((2, 5), 1.0 + self._comm.rank),
            "nowhere/0": torch.zeros(SIZE),
            **{f"kept-{n}/0": each.int() for n, each in kept.items()},
        }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rank_0_gets_the_sum_and_states_that_one_rank_has_are_sent_once(ranks):
    model = nn.Linear(5, 2, bias=False)

    def body(comm):
        counting = Counting(comm)
        turn = TurnState("", list(model.parameters()), None, Remembers(comm))
        own = OwnState(None, None, model, turn)
        return own.summed(counting), counting.reduced

    results = run_ranks(ranks, body)
    found, _ = results[0]
    assert torch.equal(found["residual/weight"], torch.full((2, 5), ranks * (ranks + 1) / 2))
    assert not found["nowhere/weight"].any()
    for n in range(6):
        assert torch.equal(found[f"kept-{n}/weight"], torch.full((SIZE,), n + 1).int())
    assert all(reduced < SIZE for _, reduced in results)
