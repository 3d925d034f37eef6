"""The optimizer states of participants: the same on all ranks, and as they were left."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.errors import RecipeError
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.rounds.averaging import Averaging
from instep.system.host_memory import HostMemory
from instep.worker.rounds.local_optimizers import LocalOptimizers
from instep.worker.rounds.local_states import OPTIMIZER, LocalStates
from instep.worker.rounds.round_update import RoundUpdate
from ranks import averaging

PARTICIPANTS = 5


class Remembers(torch.optim.SGD):
    """Keeps all kinds of things."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            own["count"] = own.get("count", 0) + 1
            own["seen"] = [*own.get("seen", []), parameter.detach().sum()]
            own["rest"] = {"none": None, "rate": 0.5, "text": "a"}


MAKES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "of_all_kinds": lambda p: Remembers(p, lr=0.1),
}


def states_of(optimizer, stays=False):
    parts = {OPTIMIZER: LocalOptimizers(optimizer)}
    return LocalStates(parts, torch.device("cpu"), stays=stays)


def model_and_optimizer(name):
    model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return model, MAKES[name](list(model.parameters()))


def step(model, optimizer, participant):
    generator = torch.Generator().manual_seed(participant)  # ranks are threads
    model(torch.randn(4, 2, 3, 3, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dim() < 4 or one.stride() == other.stride()
    elif isinstance(one, dict | list):
        assert type(one) is type(other)
        numbered = one if isinstance(one, dict) else dict(enumerate(one))
        assert len(one) == len(other)
        for key, value in numbered.items():
            equal(value, other[key])
    else:
        assert (type(one), one) == (type(other), other)


@pytest.mark.parametrize("name", MAKES)
def test_every_rank_can_resume_every_participant_as_it_was_left(name):
    def on(comm):
        model, optimizer = model_and_optimizer(name)
        local, begin = states_of(optimizer), copy.deepcopy(model.state_dict())
        fresh = copy.deepcopy(optimizer.state_dict())
        for participant in range(comm.rank, PARTICIPANTS, comm.size):
            model.load_state_dict(begin)
            optimizer.load_state_dict(copy.deepcopy(fresh))
            local.resume(participant)
            step(model, optimizer, participant)
            local.computed(participant, local.pack())
        local.exchange(comm)
        local.apply()
        other = states_of(optimizer)  # of a newcomer
        other.load_state(copy.deepcopy(local.state()))
        found = []
        for each in (local, other):
            for participant in range(PARTICIPANTS):
                each.resume(participant)
                found.append(copy.deepcopy(optimizer.state_dict()["state"]))
        return found

    model, optimizer = model_and_optimizer(name)
    begin, fresh = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    wanted = []
    for participant in range(PARTICIPANTS):
        model.load_state_dict(begin)
        optimizer.load_state_dict(copy.deepcopy(fresh))
        step(model, optimizer, participant)
        wanted.append(copy.deepcopy(optimizer.state_dict()["state"]))
    for ranks in (1, 3):
        for found in run_ranks(ranks, on):
            equal(found, wanted * 2)


def test_a_round_that_does_not_happen_leaves_what_was_there():
    model, optimizer = model_and_optimizer("momentum")
    local = states_of(optimizer)
    step(model, optimizer, 0)
    local.computed(0, local.pack())
    local.apply()
    before = copy.deepcopy(local.state())
    local.resume(0)
    step(model, optimizer, 1)
    local.computed(0, local.pack())
    local.abandon()
    local.apply()
    equal(local.state(), before)


def test_a_state_that_comes_before_there_is_a_place_for_it_is_not_dropped_in_silence():
    model, optimizer = model_and_optimizer("momentum")
    step(model, optimizer, 0)
    strategy = Averaging()
    strategy.kept = local = states_of(optimizer)
    local.computed(0, local.pack())
    local.apply()
    with pytest.raises(AssertionError, match="has no place yet"):
        Averaging().load_state(strategy.state())


class Learns(torch.optim.SGD):
    """Keeps what it has learnt in its groups."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["seen"] = self.param_groups[0].get("seen", 0) + 1


class HoldsAFunction(torch.optim.SGD):
    """Its state cannot be given to another process."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["made_by"] = print


def update_of(kind):
    parameters = [nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.ones(2)
    update = RoundUpdate(
        kind(parameters, lr=0.1),
        None,
        parameters,
        seed=0,
        max_grad_norm=None,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        job=averaging(local_steps=2),
    )
    return update, states_of(update.optimizer)


def test_an_optimizer_that_learns_in_its_groups_is_refused_where_states_are_kept():
    update, local = update_of(Learns)
    update.take_step(1, 0, 0)  # dropped at the end of the round, as all of it
    update.local = local
    with pytest.raises(RecipeError, match=r"Learns changes values of its param_groups.*'reset'"):
        update.take_step(1, 0, 1)


def test_a_state_that_no_other_process_can_be_given_is_refused():
    update, local = update_of(HoldsAFunction)
    update.take_step(1, 0, 0)
    with pytest.raises(RecipeError, match=r"HoldsAFunction has a state that other processes"):
        local.pack()


def taking_part(number):
    return [n for n in range(PARTICIPANTS) if n != number % 4]


def in_one_process(name, rounds):
    """The states that the participants of each round end with."""
    model, optimizer = model_and_optimizer(name)
    fresh, kept = copy.deepcopy(optimizer.state_dict()), {}
    begin = copy.deepcopy(model.state_dict())
    for number in range(1, rounds + 1):
        for n in taking_part(number):
            model.load_state_dict(begin)
            optimizer.load_state_dict(copy.deepcopy(kept.get(n, fresh)))
            step(model, optimizer, n)
            kept[n] = copy.deepcopy(optimizer.state_dict())
            yield number, n, kept[n]["state"]


def train(comm, strategy, name, first, last):
    """The same on ranks: participants move from one to another, and one is not in each round."""
    model, optimizer = model_and_optimizer(name)
    begin, fresh = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    found = {}
    local = strategy.kept = states_of(optimizer, stays=True)
    for number in range(first, last + 1):
        mine = [n for n in taking_part(number) if (n + number) % comm.size == comm.rank]
        strategy.recall(mine)
        strategy.begin_step(Attempt(0, number, 1))
        for n in mine:
            model.load_state_dict(begin)
            optimizer.load_state_dict(copy.deepcopy(fresh))
            local.resume(n)
            step(model, optimizer, n)
            local.computed(n, local.pack())
            found[number, n] = copy.deepcopy(optimizer.state_dict()["state"])
            strategy.begin_pass(0.25, last=False, unit=n)
            strategy.gradient(0, torch.zeros(3, 2, 2, 2))
        strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.prepare(number, 1.0)
        strategy.apply(lambda: None)
    return found


def begun(comm, at, *, state=None, own=None, left=None, **more):
    strategy, parameters = make_strategy("diloco", {}, "int4"), model_and_optimizer("plain")[0]
    strategy.load_state(state or {})
    if left is not None:
        strategy.load_left(left, [*parameters.parameters()])
    else:
        strategy.load_own(own if own is not None and comm.rank == 0 else {})
    start(strategy, comm, at, **more)
    return strategy


def start(strategy, comm, at, generation=1, **more):
    parameters = [*model_and_optimizer("plain")[0].parameters()]
    strategy.start(parameters, comm, Generation(notes=1, at=Attempt(0, at, generation), **more))


def check(found, name, first=1):
    every = {of: state for each in found for of, state in each.items()}
    for number, n, state in in_one_process(name, 6):
        if number >= first:
            equal(every.pop((number, n)), state)
    assert not every


@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in MAKES), ("adamw", 1)])
def test_a_state_that_stays_with_its_participant_is_as_it_was_left(name, ranks):
    check(run_ranks(ranks, lambda comm: train(comm, begun(comm, 0), name, 1, 6)), name)


def test_states_that_stay_are_in_a_checkpoint_for_other_ranks():
    def some(comm):
        strategy = begun(comm, 0)
        train(comm, strategy, "adamw", 1, 3)
        return strategy

    strategies = run_ranks(3, some)
    states, state = [each.own_state() for each in strategies], strategies[0].state()
    own = {name: sum(each[name] for each in states) for name in states[0]}

    def go_on(comm):
        return train(comm, begun(comm, 3, state=state, own=own), "adamw", 4, 6)

    check(run_ranks(2, go_on), "adamw", first=4)


def test_states_that_stay_are_handed_over_and_left_in_memory():
    memories, kept = [HostMemory() for _ in range(3)], {}

    def some(comm):
        strategy = kept[comm.rank] = begun(comm, 0, memory=memories[comm.rank])
        train(comm, strategy, "adamw", 1, 3)

    def leave(comm):
        if comm.rank == 1:  # killed, and replaced
            left = memories[1].at(*max(memories[1].stamps()))
            kept[1] = begun(comm, 3, state=kept[0].state(), left=left, generation=2, draining=[0])
        else:
            start(kept[comm.rank], comm, 3, 2, memory=memories[comm.rank], draining=[0])

    def go_on(comm):
        start(kept[comm.rank + 1], comm, 3, 3)
        return train(comm, kept[comm.rank + 1], "adamw", 4, 6)

    run_ranks(3, some)
    run_ranks(3, leave)
    check(run_ranks(2, go_on), "adamw", first=4)
