"""Several updates in one step: mistakes are named, and each loss is tried by itself."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.errors import RecipeError, SpecError
from instep.job import file as spec_file
from instep.recipe.build import build
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe, Turn
from instep.sync import clashes
from instep.worker.trial.reads import try_recipe

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(96.0).view(32, 3).sin())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def pair(*between):
    torch.manual_seed(0)
    return nn.ModuleDict({"one": nn.Sequential(nn.Linear(3, 3), *between), "two": nn.Linear(3, 1)})


def turn(name, **changes):
    good = {
        "name": name,
        "parameters": lambda model: model[name].parameters(),
        "optimizer": sgd,
        "compute_loss": lambda model, batch: model["two"](model["one"](batch[0])).square().mean(),
    }
    return Turn(**{**good, **changes})


def recipe(*turns, **changes):
    turns = list(turns) or [turn("one"), turn("two")]
    return Recipe(**{"model": pair(), "train": DATA, "turns": turns, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": sgd}, "Recipe.turns and Recipe.optimizer were given"),
        ({"loss": nn.MSELoss()}, "Recipe.turns and Recipe.loss were given"),
        ({"compute_loss": print}, "Recipe.turns and Recipe.compute_loss were given"),
        ({"scheduler": print}, "Recipe.turns and Recipe.scheduler were given"),
        ({"metrics": {"a": print}}, "Recipe.metrics needs (outputs, target)"),
        ({"turns": [("one", print)]}, "but a list of instep.Turn is wanted"),
        ({"turns": turn("one")}, "but a list of instep.Turn is wanted"),
        ({"turns": [turn("one"), turn("one")]}, "two turns are called 'one'"),
        ({"turns": [turn("a/b")]}, "a turn's name is 'a/b', but letters, digits and _"),
        ({"turns": [turn("one", optimizer=3)]}, "turns['one'].optimizer is an int"),
        ({"turns": []}, "a Recipe needs one of loss, compute_loss"),
    ],
)
def test_a_mistake_in_the_turns_is_named(changes, words):
    with pytest.raises(RecipeError) as caught:
        recipe(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([turn("one")], "no turn trains 'two.weight', 'two.bias': give them to a turn"),
        (
            [turn("one", parameters=lambda model: model.parameters()), turn("two")],
            "the parameter 'two.weight' is trained by two turns, 'one' and 'two'",
        ),
        (
            [turn("one", parameters=lambda model: model["one"])],
            "turns['one'].parameters returned a Sequential, but the parameters of a part",
        ),
        (
            [turn("one", parameters=lambda model: nn.Linear(2, 2).parameters())],
            "returned 2 that are not parameters of the model",
        ),
        ([turn("one", parameters=lambda model: [])], "returned none that needs gradients"),
        ([turn("one", optimizer=lambda p: 3)], "turns['one'].optimizer() returned an int"),
        (
            [turn("one", optimizer=lambda p: sgd(list(p)[:1]))],
            "holds 1 of the model's 2 parameters that need gradients: 'one.0.bias'",
        ),
        (
            [turn("one", scheduler=lambda optimizer: 3)],
            "turns['one'].scheduler() returned an int, which has no step()",
        ),
    ],
)
def test_a_mistake_in_what_a_turn_trains_is_named(turns, words):
    with pytest.raises(RecipeError) as caught:
        build(recipe(*turns), 0, CPU, 10)
    assert words in str(caught.value)


def test_what_is_frozen_belongs_to_no_turn():
    model = pair()
    model["two"].requires_grad_(False)
    (built,) = build(recipe(turn("one"), model=model), 0, CPU, 10).turns
    assert [id(p) for p in built.parameters] == [id(p) for p in model["one"].parameters()]


@pytest.mark.parametrize(
    "table",
    [
        {"check": {"corruption": True}, "train": {"determinism": "bits"}},
        {"train": {"batch_norm": "global"}},
        {"sync": {"codec": "int8"}},
        {"sync": {"name": "averaging", "participants": 8}},
        {"start": {"learning_rates": {"one.*": 0.1}}},
    ],
    ids=lambda table: next(iter(table)),
)
def test_a_job_that_does_not_fit_is_refused_in_one_sentence(table):
    job = spec_file.build({"recipe": "a.py:recipe", **table}, source="a test")
    with pytest.raises(
        SpecError, match=r" does not go with Recipe\.turns: .+ Leave one of the two"
    ):
        clashes.check(job, recipe())
    clashes.check(spec_file.build({"recipe": "a.py:recipe"}, source="a test"), recipe())


def tried(given):
    table = {"recipe": "a.py:recipe", "train": {"global_batch": 8, "micro_batches": 2}}
    job = spec_file.build(table, source="a test")
    loader = Loader(given.train, seed=0, shuffle=True, processes=0)
    built = build(given, 0, CPU, 10)
    return try_recipe(
        Forward(given, built.model, CPU, "float32"), loader, job, Batches.of_job(job, 32)
    )


def weigh(batch):
    return len(batch[0])


def noisy(model, batch):
    return model["two"](model["one"](torch.randn_like(batch[0]))).square().mean()


def test_each_turn_is_tried_and_the_worst_counts():
    assert tried(recipe(weight=weigh))[:3:2] == (True, "yes")
    assert tried(recipe()).verdict.startswith("not shown: in the turn 'one', compute_loss is your")
    batch_variance = turn("two", compute_loss=lambda m, b: m["two"](b[0]).var())
    trial = tried(recipe(turn("one"), batch_variance, weight=weigh))
    assert trial.verdict.startswith("no: in the turn 'two', compute_loss is 0.2")
    assert not trial.merge


@pytest.mark.parametrize(("layer", "verdict"), [(nn.Tanh(), "yes"), (nn.BatchNorm1d(3), "no: ")])
def test_noise_does_not_hide_what_a_layer_does_with_it(layer, verdict):
    turns = [turn(name, compute_loss=noisy) for name in ("one", "two")]
    trial = tried(recipe(*turns, model=pair(layer), weight=weigh))
    assert trial.verdict.startswith(verdict)
    assert "BatchNorm1d 'one.1' looks at" in trial.verdict or verdict == "yes"
    assert not trial.merge


def test_a_turn_whose_own_parameters_get_no_gradient_is_refused():
    detached = turn("one", compute_loss=lambda m, b: m["two"](m["one"](b[0]).detach()).mean())
    with pytest.raises(RecipeError, match=r"no parameter of the turn gets a gradient from turns\["):
        tried(recipe(detached, turn("two"), weight=weigh))
