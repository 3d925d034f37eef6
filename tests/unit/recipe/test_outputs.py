"""What `predict` may return, and what the model is called with if a recipe does not say."""

import json
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep.errors import RecipeError
from instep.recipe.outputs import as_lines, as_rows, columns, predictor

ROWS = torch.arange(6.0).view(3, 2)
Pair = namedtuple("Pair", "left right")


def recipe(**parts):
    given = {"model": nn.Linear(2, 1), "train": [1], "optimizer": torch.optim.SGD, **parts}
    return instep.Recipe(**given)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (ROWS, ["outputs"]),
        (ROWS.numpy(), ["outputs"]),
        ((ROWS, ROWS), ["outputs.0", "outputs.1"]),
        ({"a": ROWS, "b": {"c": ROWS}}, ["a", "b.c"]),
        ({"a": (ROWS, ROWS)}, ["a.0", "a.1"]),
        (Pair(ROWS, ROWS), ["left", "right"]),
        (["x", "y", "z"], ["outputs"]),
    ],
)
def test_outputs_get_names(outputs, names):
    assert list(columns(outputs, 3)) == names


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (torch.tensor(1.0), r"has the shape \[\] for a batch of 3"),
        (ROWS[:2], r"has the shape \[2, 2\] for a batch of 3"),
        ([ROWS, ROWS], "is a list of 2 for a batch of 3"),
        ({"a": 1.5}, "output 'a' of predict is a float"),
        ({"a": {"b": ROWS}, "a.b": ROWS}, "'a.b' of predict is there twice"),
        ({"sample": ROWS}, "'sample' of predict is a name of the file's own"),
        ({}, "predict returned no outputs"),
        (None, "output 'outputs' of predict is None"),
    ],
)
def test_other_outputs_are_refused_by_name(outputs, says):
    with pytest.raises(RecipeError, match=says):
        columns(outputs, 3)


def test_tensors_keep_their_bytes():
    found = {"a": ROWS.t().contiguous().t(), "b": ROWS.bfloat16()}
    heads, body = as_rows(found, ".safetensors")
    assert heads == {"a": ["F32", [2], 0], "b": ["BF16", [2], 24]}
    assert np.frombuffer(body[:24], np.float32).tolist() == ROWS.flatten().tolist()


@pytest.mark.parametrize(
    ("value", "suffix", "says"),
    [
        (["a", "b", "c"], ".npz", "is a list, which a .npz file cannot hold"),
        (ROWS.bfloat16(), ".npz", "has the type torch.bfloat16, which a .npz file"),
        (ROWS.cfloat(), ".safetensors", "has the type torch.complex64"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(value, suffix, says):
    with pytest.raises(RecipeError, match=says):
        as_rows(columns(value, 3), suffix)


def test_lines_of_json_hold_every_bit():
    values = torch.randn(3, 2)
    lines = as_lines(columns({"v": values, "w": [[1], [2, 3], "x"]}, 3), [4, 5, 7]).splitlines()
    made = [json.loads(line) for line in lines]
    assert [each["sample"] for each in made] == [4, 5, 7]
    assert [each["w"] for each in made] == [[1], [2, 3], "x"]
    assert torch.equal(torch.tensor([each["v"] for each in made]), values)
    with pytest.raises(RecipeError, match="a value that JSON does not have"):
        as_lines({"v": [{1}, {2}, {3}]}, [0, 1, 2])


@pytest.mark.parametrize("batch", [ROWS, [ROWS], (ROWS, torch.zeros(3)), [ROWS, torch.zeros(3)]])
def test_the_model_gets_the_inputs_with_labels_or_without(batch):
    made = recipe(loss=nn.MSELoss())
    assert torch.equal(predictor(made)(made.model, batch), made.model(ROWS))


def test_a_recipe_without_a_loss_says_how_its_model_is_called():
    made = recipe(compute_loss=lambda model, batch: model(batch["x"]).mean())
    assert torch.equal(predictor(made)(made.model, ROWS), made.model(ROWS))
    with pytest.raises(RecipeError, match="a batch is a dict, and a recipe without loss"):
        predictor(made)(made.model, {"x": ROWS})
    own = recipe(loss=nn.MSELoss(), predict=lambda model, batch: batch["x"])
    assert predictor(own)(own.model, {"x": 3}) == 3
    with pytest.raises(RecipeError, match=r"Recipe.predict is an int, but a function"):
        recipe(loss=nn.MSELoss(), predict=3)
