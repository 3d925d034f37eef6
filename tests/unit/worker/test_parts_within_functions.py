"""Functions that a model or a scheduler keeps, and that close over a part of the model."""

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.parallel.copies import copied
from instep.recipe.build import build_optimizer
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import NOTHING
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.reads import try_recipe


def verdict(model, **given):
    """Of a trial with 64 samples, 16 in a step of four micro-batches."""
    data = TensorDataset(torch.randn(64, 3), torch.randn(64, 2))
    given = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | given
    recipe = Recipe(model=model, train=data, weight=lambda batch: len(batch[0]), **given)
    loader = Loader(recipe.train, seed=7, shuffle=False, processes=0)
    forward = Forward(recipe, recipe.model, torch.device("cpu"), "float32")
    job = JobSpec(recipe="a.py:recipe", train=TrainSpec(global_batch=16, micro_batches=4))
    with closing(loader):
        trial = try_recipe(forward, loader, job, Batches.of_job(job, 64))
    built = build_optimizer(recipe, recipe.model, 20)
    return try_kept(forward, job, 20, trial, NOTHING, built).verdict


class Features(nn.Module):
    """Gives what a hook takes from a layer within, as feature extractors do."""

    def __init__(self, centred=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.taken, shift = {}, float(centred)
        self.body[0].register_forward_hook(
            lambda _, __, found: self.taken.update(first=found - shift * found.mean(0))
        )

    def forward(self, x):
        return self.body(x), self.taken["first"]


def of_both(outputs, target):
    return functional.mse_loss(outputs[0], target) + 0.1 * outputs[1].square().sum(1).mean()


@pytest.mark.parametrize(("centred", "said"), [(False, "yes"), (True, "no: ")])
def test_what_a_hook_takes_from_a_layer_is_that_of_the_model_that_is_tried(centred, said):
    model = Features(centred)
    assert verdict(model, loss=of_both).startswith(said)
    assert not model.taken


class Acts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))
        self.calls = calls = []
        self.act = lambda x, by=2.0: (calls.append(1), x * self.scale * by)[1]

    def forward(self, x):
        return self.act(self.layer(x))


def test_a_function_that_a_model_keeps_computes_with_the_parameters_of_the_copy():
    model = Acts()
    made = copied(model)
    made(torch.ones(1, 3)).sum().backward()
    assert made.scale.grad is not None
    assert model.scale.grad is None
    assert (len(model.calls), len(made.calls)) == (0, 1)


class Freezes:
    """A scheduler that freezes a layer at its fifth step, or has it trained from then on."""

    def __init__(self, model, trained=False):
        self.model, self.trained, self.count = model, trained, 0

    def step(self):
        self.count += 1
        if self.count == 5:
            self.model[0].requires_grad_(self.trained)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_scheduler_may_need_the_model_in_a_later_step():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    given = {"loss": nn.MSELoss(), "scheduler": lambda _: Freezes(model)}
    assert verdict(model, **given) == "yes"
    assert model[0].weight.requires_grad


def test_a_scheduler_that_unfreezes_a_layer_is_refused_before_the_first_step():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    given = {"loss": nn.MSELoss(), "scheduler": lambda _: Freezes(model, trained=True)}
    with pytest.raises(RecipeError, match=r"the parameter '0.weight' need a gradient in a later"):
        verdict(model, **given)
    assert not model[0].weight.requires_grad


def test_a_scheduler_that_fails_in_a_later_step_is_not_said_to_fail_in_loading():
    class Fails(Freezes):
        def step(self):
            self.count += 1
            assert self.count < 5, "no fifth step"

    model = nn.Linear(3, 2)
    said = verdict(model, loss=nn.MSELoss(), scheduler=lambda _: Fails(model))
    assert said.startswith("not shown: whether a checkpoint has all that SGD keeps cannot be tried")
    assert "no fifth step" in said
