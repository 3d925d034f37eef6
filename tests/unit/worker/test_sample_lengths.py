"""A wrong length is named with its own sample, and what is right is taken as it is."""

import numpy as np
import pytest
import torch

from instep.errors import DataError, RecipeError
from instep.worker.reading.sample_lengths import _called, _listed


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        ("a", "'a'"),
        (2**70, str(2**70)),
        ([1, 2], r"\[1, 2]"),
    ],
)
def test_the_sample_whose_length_is_wrong_is_named(wrong, shown):
    with pytest.raises(DataError, match=f"length is {shown} for sample 2: a length is a whole"):
        _listed("Recipe.length", [5, 7, wrong, 3], 4)


@pytest.mark.parametrize(
    "given",
    [
        [5, 0, 3],
        np.array([5, 0, 3], object),
        torch.tensor([5, 0, 3]),
        np.array([5, 0, 3], np.uint8),
    ],
)
def test_whole_numbers_are_lengths_in_any_container(given):
    assert _listed("Recipe.length", given, 3).values.tolist() == [5, 0, 3]


def test_a_function_of_lengths_that_raises_is_named_with_the_sample():
    with pytest.raises(RecipeError, match=r"Recipe.length\(dataset, 2\) raises IndexError: list"):
        _called(lambda dataset, index: len(dataset[index]), [[1], [2]], np.array([0, 2]))
