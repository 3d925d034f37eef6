"""What is tried before the first step leaves nothing behind."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from instep.data.loader import Loader
from instep.data.reading.generators import DrawDetector
from instep.errors import RecipeError
from instep.recipe.forward import Forward
from instep.recipe.losses import loss_of
from instep.recipe.recipe import Recipe
from instep.recipe.rehearsal import try_validation


class Restless(nn.Module):
    """It counts and draws wherever it is called, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 2), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        self.seen += len(inputs)
        return self.linear(inputs + torch.rand(3) + np.random.rand() + random.random())


def loader(recipe):
    return Loader(recipe.validate, seed=0, shuffle=False, collate=None, processes=0)


def recipe_of(model, **metrics):
    samples = [(torch.ones(3), 1)] * 7
    return Recipe(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=samples,
        validate=samples,
        metrics=metrics,
    )


def test_a_validation_that_is_tried_moves_nothing():
    sizes = []
    recipe = recipe_of(Restless(), size=lambda outputs, _: sizes.append(len(outputs)) or 1.0)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    before = DrawDetector()
    try_validation(forward, loader(recipe), 4)
    assert sizes == [4]
    assert not before.drawn()
    assert forward.model is recipe.model
    assert (recipe.model.calls, float(recipe.model.seen), recipe.model.training) == (0, 0.0, True)


def test_a_metric_that_is_no_number_is_found():
    recipe = recipe_of(Restless(), right=lambda outputs, target: outputs.argmax(1) == target)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    with pytest.raises(RecipeError, match=r"metrics\['right'\] returned a tensor of shape \[4\]"):
        try_validation(forward, loader(recipe), 4)
    assert recipe.model.calls == 0


def test_a_loss_that_takes_what_is_no_tensor_is_left_alone():
    assert loss_of(lambda outputs, target: outputs["a"] + target, {"a": 2}, 3) == 5


def test_what_a_loss_raises_on_a_tensor_is_its_own():
    with pytest.raises(TypeError, match="mine"):
        loss_of(lambda *_: (_ for _ in ()).throw(TypeError("mine")), torch.ones(2), None)
