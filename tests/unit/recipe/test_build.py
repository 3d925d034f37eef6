"""Every mistake in a recipe is named in the user's words, as early as it can be seen."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from instep.errors import RecipeError
from instep.job import file as spec_file
from instep.recipe.build import build, call, set_generators
from instep.recipe.recipe import Recipe
from instep.recipe.source_file import load_function
from instep.worker.training.training import Training

DATA = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
CPU = torch.device("cpu")
STEPS = 30


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def recipe(**changes):
    good = {"model": nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": sgd, "train": DATA}
    return Recipe(**{**good, **changes})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": None}, "compute_loss, and embed with batch_loss; none was given"),
        (
            {"compute_loss": lambda m, b: None},
            "embed with batch_loss; loss and compute_loss were given",
        ),
        ({"loss": None, "embed": print}, "Recipe.embed was given without batch_loss"),
        ({"loss": None, "batch_loss": print}, "Recipe.batch_loss was given without embed"),
        ({"embed": print, "batch_loss": print}, "loss and batch_loss were given"),
        ({"loss": None, "embed": 3, "batch_loss": print}, "Recipe.embed is an int"),
        (
            {"loss": None, "embed": print, "batch_loss": print, "weight": len},
            "batch_loss is a loss over the whole global batch. Leave weight out",
        ),
        (
            {"loss": None, "embed": print, "batch_loss": print, "metrics": {"a": print}},
            "which batch_loss does not give",
        ),
        ({"loss": "mse"}, "Recipe.loss is a str, but a function is wanted"),
        ({"loss": None, "compute_loss": 3}, "Recipe.compute_loss is an int"),
        (
            {"loss": None, "compute_loss": print, "metrics": {"a": print}},
            "Recipe.metrics needs (outputs, target)",
        ),
        ({"train": None}, "Recipe.train is None, but a map-style dataset is wanted"),
        ({"validate": Stream()}, "Recipe.validate is a Stream, which has no length"),
        ({"train": DataLoader(DATA, None)}, "Recipe.train is a DataLoader that has batch_size"),
        ({"train": []}, "Recipe.train has length zero"),
        (
            {"train": {"x": torch.ones(3), "y": torch.ones(3)}},
            "Recipe.train is a dict with the keys 'x', 'y': a map-style dataset is wanted, in "
            "which dataset[0] is the first sample. If the values are columns, give rows",
        ),
        ({"validate": {"train": [1], "test": [2]}}, "If they are datasets, give one of them."),
        ({"validate": iter([])}, "Recipe.validate is a list_iterator"),
        ({"validate": ()}, "Recipe.validate has length zero"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "Wrap it: optimizer=lambda"),
        ({"scheduler": 3}, "Wrap it: scheduler=lambda"),
        ({"collate": 3}, "Recipe.collate is an int"),
        ({"augment": "flip"}, "Recipe.augment is a str"),
        ({"parameters": []}, "Recipe.parameters is a list"),
        ({"metrics": {"accuracy": 0.5}}, "Recipe.metrics['accuracy'] is a float, not a function"),
        ({"metrics": [print]}, "Recipe.metrics is a list, but a dict is wanted"),
        ({"metrics": print}, "but a dict is wanted: name to metric(outputs, target)"),
        ({"metrics": {"loss": print}}, "the name 'loss' is taken"),
    ],
)
def test_a_recipe_with_a_part_of_the_wrong_kind_is_refused(changes, words):
    with pytest.raises(RecipeError) as error:
        recipe(**changes)
    assert words in str(error.value)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)


def frozen():
    return nn.Linear(2, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 3}, "Recipe.model is an int, but an nn.Module is wanted"),
        ({"model": lambda: "net"}, "Recipe.model() returned a str"),
        ({"model": nn.ReLU()}, "the model (ReLU) has no parameters to train"),
        ({"model": frozen()}, "all 2 parameters of the model (Linear) are frozen"),
        ({"model": Lazy()}, "the parameter 'layer.weight' is lazy"),
        ({"model": nn.Linear(2, 1, dtype=torch.complex64)}, "'weight' is complex"),
        ({"optimizer": lambda p: None}, "Recipe.optimizer() returned None"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=-1)}, "Recipe.optimizer() refused"),
        ({"optimizer": lambda: None}, "Recipe.optimizer() refused"),
        ({"optimizer": lambda p: sgd([nn.Parameter(torch.ones(1))])}, "none of the model's"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
        ({"scheduler": lambda o: 3}, "Recipe.scheduler() returned an int, which has no step()"),
        ({"scheduler": lambda o: StepLR(o)}, "Recipe.scheduler() refused"),
        ({"scheduler": lambda o: None}, "Recipe.scheduler() returned None"),
    ],
)
def test_a_part_that_gives_the_wrong_thing_is_refused(changes, words):
    with pytest.raises(RecipeError) as error:
        build(recipe(**changes), 0, CPU, STEPS)
    assert words in str(error.value)


@pytest.mark.parametrize("determinism", ["order", "bits"])
def test_a_complex_parameter_is_refused_in_one_sentence_however_sums_are_made(determinism):
    table = {"recipe": "a.py:f", "train": {"determinism": determinism}}
    member = SimpleNamespace(job=spec_file.build(table, source="test"), checkpoint=None)
    with pytest.raises(RecipeError, match=r"'weight' is complex .* instep cannot train\."):
        Training(member, recipe(model=nn.Linear(2, 1, dtype=torch.complex64)), CPU)


def test_what_is_built_holds_each_trained_parameter_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    built = build(recipe(model=model), 0, CPU, STEPS)
    expected = [model[0].weight, model[0].bias, model[1].bias, model[2].weight]
    assert list(map(id, built.parameters)) == list(map(id, expected))
    assert built.scheduler is None


def test_parameter_groups_come_from_the_recipe():
    groups = lambda m: [{"params": [m.weight], "lr": 1.0}, {"params": [m.bias]}]  # noqa: E731
    built = build(recipe(parameters=groups), 0, CPU, STEPS)
    assert [group["lr"] for group in built.optimizer.param_groups] == [1.0, 0.1]


def test_a_scheduler_may_ask_for_the_steps_of_the_whole_run():
    built = build(recipe(scheduler=lambda o, steps: CosineAnnealingLR(o, steps)), 0, CPU, STEPS)
    assert built.scheduler.T_max == STEPS
    built = build(recipe(scheduler=lambda o, size=7: StepLR(o, size)), 0, CPU, STEPS)
    assert built.scheduler.step_size == 7


def test_a_model_made_by_a_function_is_the_same_for_the_same_seed():
    made = [
        build(recipe(model=lambda: nn.Linear(2, 1)), seed, CPU, STEPS).model.weight
        for seed in (3, 3, 4)
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_a_recipe_function_is_called_with_all_generators_seeded():
    drawn = []

    def function():
        drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
        return recipe()

    for _ in range(2):
        call(function, {}, 2**40 + 7)
    assert drawn[0] == drawn[1]


def given(width, depth=2):
    return recipe()


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (given, {}, "'given' needs 'width': give it under [arguments]"),
        (
            given,
            {"width": 1, "dept": 3},
            "gives 'dept', which the recipe function 'given' does not take",
        ),
        (given, {"width": 1, "dept": 3}, "Did you mean 'depth'?"),
        (lambda: nn.Linear(1, 1), {}, "returned a Linear, but an instep.Recipe is wanted"),
        (lambda: None, {}, "returned None"),
    ],
)
def test_a_call_that_cannot_be_is_refused(function, arguments, words):
    with pytest.raises(RecipeError) as error:
        call(function, arguments, 0)
    assert words in str(error.value)


def test_a_recipe_function_may_take_any_arguments():
    seen = {}

    def function(**arguments):
        seen.update(arguments)
        return recipe()

    call(function, {"a": 1}, 0)
    assert seen == {"a": 1}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "instep_recipe", raising=False)
    file = tmp_path / "mine.py"
    file.write_text("import beside\n\ndef train_it():\n    return beside.N\n\nvalue = 3\n")
    (tmp_path / "beside.py").write_text("N = 41\n")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    yield file
    sys.modules.pop("instep_recipe", None)
    sys.modules.pop("beside", None)


def test_a_recipe_file_is_imported_once_and_may_import_what_lies_beside_it(file):
    function = load_function(f"{file}:train_it")
    assert function() == 41
    assert load_function(f"{file}:train_it") is function


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train_i", "has no function 'train_i'. Did you mean 'train_it'? Known: train_it."),
        ("value", "'value' in"),
    ],
)
def test_a_reference_to_no_function_is_refused(file, name, words):
    with pytest.raises(RecipeError) as error:
        load_function(f"{file}:{name}")
    assert words in str(error.value)


def test_a_missing_recipe_file_is_refused_with_the_near_miss(file):
    with pytest.raises(RecipeError, match=r"Did you mean 'mine\.py'\?"):
        load_function(f"{file.parent / 'mien.py'}:train_it")


def test_a_recipe_file_that_cannot_be_imported_is_named_with_the_cause_each_time(file):
    file.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(RecipeError) as error:
            load_function(f"{file}:train_it")
        assert f"{file} cannot be imported: ZeroDivisionError" in str(error.value)
        assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_recipe_file_that_leaves_python_leaves_it(file):
    file.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit):
        load_function(f"{file}:train_it")


def test_an_optimizer_of_tensors_outside_the_model_is_refused():
    scale = nn.Parameter(torch.ones(3))
    groups = lambda model: [*model.parameters(), scale]  # noqa: E731
    with pytest.raises(RecipeError, match=r"1 tensors that are not the model's.*\[3\]"):
        build(recipe(parameters=groups), 0, CPU, 10)


def test_torch_draws_what_it_draws_after_its_own_manual_seed():
    set_generators(2**62 + 5)
    ours = torch.rand(4)
    torch.manual_seed(2**62 + 5)
    assert torch.equal(ours, torch.rand(4))
