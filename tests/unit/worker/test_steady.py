"""Which blocks every sample goes through."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import instep
from instep.recipe.forward import Forward
from instep.worker.trial.steady import steady_blocks


class Routed(nn.Module):
    """Three layers, of which `way` says which a sample goes through, and in which order."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.way = nn.LayerNorm(4), way

    def forward(self, x):
        for number in self.way(x):
            x = x + self.layers[number](x)
        return self.norm(x)


def steady(way, samples=8):
    """Which of the three are steady, by their numbers."""
    torch.manual_seed(3)
    model = Routed(way)
    recipe = instep.Recipe(
        model=model,
        train=[torch.zeros(4)],
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    batches = [(torch.randn(1, 4), torch.randn(1, 4)) for _ in range(samples)]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = steady_blocks(forward, batches, [f"layers.{n}" for n in range(3)], seed=1)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not model.layers[0]._forward_pre_hooks
    return [int(name[-1]) for name in found]


def test_layers_that_each_sample_uses_are_steady():
    assert steady(lambda x: [0, 1, 2]) == [0, 1, 2]
    assert steady(lambda x: [2, 0, 0, 1]) == [0, 1, 2]


def test_a_layer_that_some_samples_use_is_not():
    assert steady(lambda x: [0, 2, *([1] if x[0, 0] > 0 else [])]) == [0, 2]


def test_a_layer_that_some_samples_use_twice_is_not():
    assert steady(lambda x: [0, *([1] * (1 + int(x[0, 0] > 0))), 2]) == [0, 2]


def test_experts_of_which_each_sample_has_one_are_not():
    assert steady(lambda x: [int(functional.relu(x).argmax()) % 3]) == []


def test_layers_that_are_dropped_at_random_are_not():
    assert steady(lambda x: [0, 1, *([2] if torch.rand(()) > 0.5 else [])]) == [0, 1]


def test_layers_that_change_places_are_not():
    assert steady(lambda x: [0, 1, 2] if x[0, 0] > 0 else [0, 2, 1]) == [0]


def test_a_layer_that_never_runs_is_steady():
    assert steady(lambda x: [0, 1]) == [0, 1, 2]


def test_where_no_sample_can_be_passed_alone_nothing_is_known():
    def refuses(x):
        raise ValueError("more than one value per channel")

    assert steady(refuses) == [0, 1, 2]
    assert steady(lambda x: [0], samples=0) == [0, 1, 2]
