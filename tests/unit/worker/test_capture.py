"""What a snapshot gives back is what it was made of, also to optimizers that look at memory."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

from instep.spec import MeshSpec
from instep.state.boxes import MeshRank
from instep.worker.step.capture import Progress, capture, restore
from instep.worker.step.update import Update


class Nothing:
    """A strategy without memory."""

    def state(self):
        return {}

    def load_state(self, state):
        assert not state


class Turn(NamedTuple):
    """One update of a step."""

    name: str
    update: Update
    strategy: Nothing


def an_update(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parameters = list(model.parameters())
    return Update(optimizer, None, parameters, seed=0, max_grad_norm=None, scaler=scaler)


def test_a_fused_optimizer_goes_on_with_weights_that_lie_in_memory_as_images_do():
    torch.manual_seed(3)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    fresh, images = copy.deepcopy(model), torch.randn(5, 3, 2, 2)
    update = an_update(model)

    def step(of, by):
        of.zero_grad()
        of(images).square().sum().backward()
        by.apply(1)

    step(model, update)
    taken = capture(Progress(), model, [Turn("", update, Nothing())])
    for group in taken.tensors.values():  # as files keep them
        for name, tensor in group.items():
            group[name] = tensor.clone(memory_format=torch.contiguous_format)
    again = an_update(fresh)
    restore(taken, "a test", fresh, [Turn("", again, Nothing())])
    for _ in range(2):
        step(model, update)
        step(fresh, again)
    assert torch.equal(model.weight, fresh.weight)


@pytest.mark.parametrize("rank", [None, MeshRank(MeshSpec(shard=2), 0)])
def test_what_an_optimizer_keeps_for_no_parameter_is_kept(rank):
    """A number, and a tensor, under names: as MADGRAD has its `k`."""
    model = nn.Linear(3, 2)
    turn, again = (Turn("", an_update(model), Nothing()) for _ in range(2))
    turn.update.optimizer.state["k"] = 3
    turn.update.optimizer.state["last"] = torch.arange(4.0)
    taken = capture(Progress(), model, [turn], rank=rank)
    restore(taken, "a test", model, [again], rank=rank)
    found = again.update.optimizer.state
    assert found["k"] == 3
    assert torch.equal(found["last"], torch.arange(4.0))
