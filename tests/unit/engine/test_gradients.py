"""Whoever listens to parameters is freed with its last reference, not with the parameters."""

import weakref

import torch

from instep.engine.gradients import Gradients


def test_parameters_do_not_keep_alive_who_listened_to_them():
    model = torch.nn.Linear(3, 2)
    heard: list[int] = []
    listening = Gradients(list(model.parameters()), lambda slot, _: heard.append(slot))
    model(torch.ones(1, 3)).sum().backward()
    assert sorted(heard) == [0, 1]
    assert listening.count == 2
    gone = weakref.ref(listening)
    del listening
    assert gone() is None
    model(torch.ones(1, 3)).sum().backward()
    assert len(heard) == 2
    assert model.bias.grad.tolist() == [1, 1], "nobody takes it now"


def test_a_parameter_that_is_frozen_after_the_forward_pass_gives_no_gradient():
    model = torch.nn.Linear(3, 2)
    heard: list[int] = []
    listening = Gradients(list(model.parameters()), lambda slot, _: heard.append(slot))
    loss = model(torch.ones(1, 3)).sum()
    model.weight.requires_grad_(False)
    loss.backward()
    assert (heard, listening.count) == ([1], 1)
