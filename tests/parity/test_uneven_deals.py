"""Who computes how much does not show in what comes out: to the bit, or to rounding."""

import pytest
import torch
from torch import nn

from helpers import Table, far_apart, train
from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks

STEPS = 8  # two epochs of 48 samples in batches of 14: the last of each has 6


class Normed(nn.Module):
    """Running statistics that every pass moves, between layers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Plain(Normed):
    """No layer that sees its batch: passes may be merged."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def changing(step):
    """Evenly; then one is slow; then it has nothing; then another has nearly all."""
    return [None, (1, 0.2, 1), (1, 1e-6, 1), (0.1, 0.1, 9)][step % 4]


DEALS = {
    "slow": lambda _: (1, 0.25, 1),
    "none for the first": lambda _: (1e-6, 1, 1),
    "all for the last": lambda _: (1e-6, 1e-6, 1),
    "changing": changing,
}
SETTINGS = {"steps": STEPS, "global_batch": 14, "micro_batches": 3, "clip": 1.0}


def model(kind):
    torch.manual_seed(11)
    return kind()


@pytest.mark.parametrize("deal", DEALS)
def test_with_bits_every_deal_leaves_what_one_process_leaves(deal):
    table, start = Table(48), model(Normed)
    whole, losses = train(AloneComm(), start, sgd, table, exact=True, **SETTINGS)
    settings = {**SETTINGS, "exact": True, "speeds": DEALS[deal]}
    for state, own in run_ranks(3, lambda comm: train(comm, start, sgd, table, **settings)):
        assert own == losses
        assert state.keys() == whole.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize(
    ("kind", "merge"), [(Normed, False), (Plain, False), (Plain, True)], ids=str
)
@pytest.mark.parametrize("deal", DEALS)
def test_in_order_every_deal_leaves_what_one_process_leaves_to_rounding(deal, kind, merge):
    table, start = Table(48, dtype=torch.float64), model(kind).double()
    whole, losses = train(AloneComm(), start, sgd, table, **SETTINGS)
    settings = {**SETTINGS, "merge": merge, "speeds": DEALS[deal]}
    results = run_ranks(3, lambda comm: train(comm, start, sgd, table, **settings))
    for state, own in results:
        assert far_apart(state, whole) < 1e-12
        torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=1e-6, atol=0)
        for name, tensor in state.items():
            assert torch.equal(tensor, results[0][0][name]), f"{name} differs between ranks"
