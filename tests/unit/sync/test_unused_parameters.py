"""A parameter that nobody uses in a step is not moved in it, and what a codec owes it waits."""

import copy

import pytest
import torch
from torch import nn

from instep.comm.codecs import CODECS
from instep.comm.codecs.dgc import DGC
from instep.comm.codecs.top_k import TopK
from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.rounds.coded import Coded
from instep.worker.loop.momentum import move_momentum

SHAPES = [(12, 19), (5,), (40,), (3, 3), (11, 13)]
STEPS, NEVER, RARE = 8, 2, (1, 4)
OPTIONS = {
    "powersgd": {"rank": 1, "start_after": 2},
    "dgc": {"density": 0.05, "warm_up": 0},
    "top_k": {"density": 0.05},
}


class MeanSign:
    """A communication hook, as a user may write it: it gives zeros a value too."""

    carries, reducer = True, "hook"

    def reduce(self, values, comm, *, key, left):
        sent = values.sign() * values.abs().mean() + 0.01
        torch.sub(values, sent, out=left)
        values.copy_(sent)
        comm.all_reduce(values).wait()


class Gathered(TopK):
    """A codec of a user's, which cannot be cut."""

    segmentable = False

    def __init__(self):
        super().__init__(density=0.05)


OWN = {"hook": MeanSign, "gathered": Gathered}
NAMES = [*(name for name in CODECS if name != "none"), *OWN]


def used(step):
    """One never; two in every other step."""
    return [slot for slot in range(len(SHAPES)) if slot != NEVER and (slot not in RARE or step % 2)]


def gradient(step, slot, rank):
    draw = torch.Generator().manual_seed(100 * step + 10 * slot + rank)
    return torch.randn(SHAPES[slot], generator=draw)


def owed(strategy):
    """What a rank carries over, by kind and parameter."""
    return {name: tensor.clone() for name, tensor in strategy.own_state().items()}


def agree(strategy, step, rank):
    """A step up to what is handed out."""
    strategy.begin_step(Attempt(0, step, 1))
    strategy.begin_pass(1.0, last=True)
    for slot in used(step):
        strategy.gradient(slot, gradient(step, slot, rank))
    strategy.exchange(torch.zeros(0, dtype=torch.float64))
    strategy.hand_out()


def trained(comm, name):
    """What is handed out in each step, and what is owed after it."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    codec = (OWN.get(name) or CODECS[name])(**OPTIONS.get(name, {}))
    if name == "dgc":
        codec.momentum = 0.5
    strategy = AllReduce(codec=codec, encode_vectors=True, bucket_mb=0.001)
    strategy.start(parameters, comm, Generation(notes=0))
    found = []
    for step in range(1, STEPS + 1):
        agree(strategy, step, comm.rank)
        handed = [parameter.grad for parameter in parameters]
        assert [slot for slot, each in enumerate(handed) if each is not None] == used(step)
        found.append([None if each is None else each.clone() for each in handed])
        strategy.apply(lambda: None)
        found[-1].append(owed(strategy))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_unused_parameters_get_nothing_and_what_is_owed_to_them_stays(name, ranks):
    results = run_ranks(ranks, trained, name)
    for step in range(2, STEPS + 1):
        before, after = (
            [sum(every[at][-1].get(f"{kind}/{slot}", torch.zeros(1)) for every in results)
             for kind in ("residual", "momentum") for slot in range(len(SHAPES))
             if slot not in used(step)]
            for at in (step - 2, step - 1)
        )  # fmt: skip
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dgc", "hook")])
def test_nothing_is_lost(name, ranks):
    """`dgc` drops by a rule of its own; and the rounding of some codecs is right on average."""
    results = run_ranks(ranks, trained, name)
    kinds = results[0][-1][-1]
    if not kinds:
        return
    for slot, shape in enumerate(SHAPES):
        given, got = torch.zeros(shape), torch.zeros(shape)
        for step in range(1, STEPS + 1):
            if slot in used(step):
                got += results[0][step - 1][slot]
                for rank in range(ranks):
                    given += gradient(step, slot, rank)
        left = sum(every[-1][-1][f"residual/{slot}"] for every in results)
        torch.testing.assert_close(got + left, given, rtol=1e-4, atol=1e-4)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def with_momentum_of_dgc(comm, start):
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    strategy = AllReduce(codec=DGC(density=1), encode_vectors=True)
    move_momentum(optimizer, strategy, "dgc")
    strategy.start(parameters, comm, Generation(notes=0))
    for step in range(1, STEPS + 1):
        agree(strategy, step, comm.rank)
        strategy.apply(optimizer.step)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_momentum_of_dgc_waits_as_that_of_a_plain_loop(ranks):
    start = [torch.ones(shape) for shape in SHAPES]
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for slot in used(step):
            parameters[slot].grad = sum(gradient(step, slot, rank) for rank in range(ranks))
        optimizer.step()
    for found in run_ranks(ranks, with_momentum_of_dgc, start):
        for one, other in zip(found, parameters, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-5)


def test_an_optimizer_leaves_an_unused_parameter_alone_with_powersgd():
    """Neither weight decay nor momentum moves it, as in a plain loop."""

    def body(comm):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = sgd(parameters)
        options = {"rank": 1, "start_after": 0}
        strategy = make_strategy("all_reduce", {}, "powersgd", options)
        strategy.start(parameters, comm, Generation(notes=0))
        moved = []
        for step in range(1, STEPS + 1):
            before = copy.deepcopy([parameter.detach() for parameter in parameters])
            strategy.begin_step(Attempt(0, step, 1))
            strategy.begin_pass(1.0, last=True)
            for slot in used(step):
                strategy.gradient(slot, gradient(step, slot, comm.rank))
            strategy.exchange(torch.zeros(0, dtype=torch.float64))
            strategy.hand_out()
            strategy.apply(optimizer.step)
            every = enumerate(zip(before, parameters, strict=True))
            moved.append([slot for slot, (one, other) in every if not torch.equal(one, other)])
        return moved

    for moved in run_ranks(2, body):
        assert moved == [used(step) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_before_rounds_what_participants_are_owed_waits_too(ranks):
    """Whoever has them, and their sum."""
    participants = 3

    def body(comm):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        strategy = Coded(CODECS["int4"](), encode_vectors=True)
        strategy.start_after = STEPS
        strategy.start(parameters, comm, Generation(notes=0))
        found = []
        for step in range(1, STEPS + 1):
            strategy.begin_step(Attempt(0, step, 1))
            for part in range(participants):
                if (part + step) % comm.size == comm.rank:
                    strategy.begin_pass(1 / participants, last=False, unit=part)
                    for slot in used(step):
                        strategy.gradient(slot, gradient(step, slot, part))
            strategy.exchange(torch.zeros(0, dtype=torch.float64))
            strategy.hand_out()
            handed = [parameter.grad for parameter in parameters]
            assert [slot for slot, each in enumerate(handed) if each is not None] == used(step)
            strategy.apply(lambda: None)
            found.append(owed(strategy))
        return found

    results = run_ranks(ranks, body)
    for step in range(2, STEPS + 1, 2):
        for of in (*range(participants), -1):
            for slot in RARE:
                before, after = (
                    sum(every[at][f"residual-{of}/{slot}"] for every in results)
                    for at in (step - 2, step - 1)
                )
                assert before.any()
                assert torch.equal(before, after)
