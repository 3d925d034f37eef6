"""A step that reads what the last pass has left behind is named, and one that does not is not."""

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import NOTHING
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.reads import try_recipe


class Scaled(nn.Module):
    """Leaves how large its last outputs were."""

    size = 1.0

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 2)

    def forward(self, x):
        y = self.inside(x)
        self.size = float(y.detach().abs().mean())
        return y


def tried(optimizer, model, parts=4, **given):
    """The verdict of a trial of passes, and of what steps keep and read."""
    torch.manual_seed(0)
    recipe = Recipe(
        model=model,
        train=TensorDataset(torch.randn(64, 4), torch.randn(64, 2)),
        optimizer=optimizer,
        weight=lambda batch: len(batch[0]),
        **(given or {"loss": nn.MSELoss()}),
    )
    loader = Loader(recipe.train, seed=7, shuffle=False, processes=0)
    job = JobSpec(
        recipe="a.py:recipe", train=TrainSpec(global_batch=16, micro_batches=parts), workers=1
    )
    with closing(loader):
        forward = Forward(recipe, model, torch.device("cpu"), "float32")
        trial = try_recipe(forward, loader, job, Batches.of_job(job, 64))
        return try_kept(forward, job, 10, trial, NOTHING).verdict


def by_hook(read, *, after=False):
    """An optimizer with a hook that sets the learning rate by something."""

    def made(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def hook(of, *_):
            for group in of.param_groups:
                group["lr"] = 0.1 / (1 + read())

        register = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
        register(hook)
        return optimizer

    return made


class BySize(torch.optim.SGD):
    """Takes steps by how large the outputs of a model were."""

    def __init__(self, parameters, model):
        super().__init__(parameters, lr=0.1)
        self.model = model

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.model.size)
        return super().step(closure)


@pytest.mark.parametrize("after", [False, True])
def test_a_hook_that_reads_what_the_model_left(after):
    model = Scaled()
    verdict = tried(by_hook(lambda: model.size, after=after), model)
    assert verdict.startswith("not shown: each pass leaves 'size' behind"), verdict


def test_a_step_of_an_optimizers_own_class():
    model = Scaled()
    verdict = tried(lambda parameters: BySize(parameters, model), model)
    assert "leaves 'size' behind" in verdict


def test_what_a_loss_left_in_a_dict():
    model, state = nn.Linear(4, 2), {"loss": 0.0}

    def loss(model, batch):
        each = (model(batch[0]) - batch[1]).square().mean()
        state["loss"] = float(each.detach())
        return each

    assert "leaves 'state' behind" in tried(
        by_hook(lambda: state["loss"]), model, compute_loss=loss
    )


def test_a_schedulers_function():
    model = Scaled()
    verdict = tried(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        model,
        loss=nn.MSELoss(),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + model.size)
        ),
    )
    assert "leaves 'size' behind" in verdict


def test_a_single_pass_is_what_one_machine_has():
    model = Scaled()
    assert tried(by_hook(lambda: model.size), model, parts=1) == "yes"


@pytest.mark.parametrize("kind", ["another", "nothing", "log"])
def test_what_no_step_reads(kind):
    model, other, seen = Scaled(), nn.Linear(1, 1), []
    if kind == "another":
        optimizer = by_hook(lambda: float(other.weight.detach().abs().sum()))
    elif kind == "nothing":
        optimizer = by_hook(lambda: 1.0)
    else:

        def optimizer(parameters):
            made = torch.optim.SGD(parameters, lr=0.1)
            made.register_step_post_hook(lambda *_: seen.append(model.size))
            return made

    assert tried(optimizer, model) == "yes"
