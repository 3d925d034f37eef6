"""The optimizer states of participants: the same on all ranks, and as they were left."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.errors import RecipeError
from instep.sync.rounds.averaging import Averaging
from instep.worker.local_optimizers import LocalOptimizers
from instep.worker.rounds import RoundUpdate

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
        local, begin = LocalOptimizers(optimizer), copy.deepcopy(model.state_dict())
        fresh = copy.deepcopy(optimizer.state_dict())
        for participant in range(comm.rank, PARTICIPANTS, comm.size):
            model.load_state_dict(begin)
            optimizer.load_state_dict(copy.deepcopy(fresh))
            local.resume(participant)
            step(model, optimizer, participant)
            local.computed(participant, local.pack())
        local.exchange(comm)
        local.apply()
        other = LocalOptimizers(optimizer)  # of a newcomer
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
    local = LocalOptimizers(optimizer)
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
    strategy.kept = local = LocalOptimizers(optimizer)
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
        local_steps=2,
    )
    return update, LocalOptimizers(update.optimizer)


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
