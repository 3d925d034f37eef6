"""A parameter that nobody uses in a step is not moved in it, whatever stands in its block."""

import pytest
import torch
from torch import nn

from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce

SHAPES = [(7, 9), (5,), (40,), (3, 3)]
STEPS, NEVER = 6, 2


def used(step):
    """The second in every other step; the third never."""
    return [slot for slot in range(len(SHAPES)) if slot != NEVER and (slot != 1 or step % 2)]


def gradient(step, slot, rank):
    draw = torch.Generator().manual_seed(100 * step + 10 * slot + rank)
    return torch.randn(SHAPES[slot], generator=draw)


def trained(comm, name):
    """What is handed out, and what is still to be sent."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    strategy = AllReduce(codec=CODECS[name](), encode_vectors=True)
    strategy.start(parameters, comm, notes=0)
    found = [torch.zeros(shape) for shape in SHAPES]
    for step in range(1, STEPS + 1):
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1.0, last=True)
        for slot in used(step):
            strategy.gradient(slot, gradient(step, slot, comm.rank))
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        handed = [parameter.grad for parameter in parameters]
        assert [slot for slot, each in enumerate(handed) if each is not None] == used(step)
        for slot in used(step):
            found[slot] += handed[slot]
        strategy.apply(lambda: None)
    return found, strategy.own_state()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["sign", "int4", "int8"])
def test_unused_parameters_get_nothing_and_nothing_is_lost(name, ranks):
    results = run_ranks(ranks, trained, name)
    for slot, shape in enumerate(SHAPES):
        given = torch.zeros(shape)
        for step in range(1, STEPS + 1):
            for rank in range(ranks):
                given += gradient(step, slot, rank) if slot in used(step) else 0.0
        left = sum(own[f"residual/{slot}"] for _, own in results)
        torch.testing.assert_close(results[0][0][slot] + left, given, rtol=1e-4, atol=1e-4)
