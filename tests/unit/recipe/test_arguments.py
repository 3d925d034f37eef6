"""The parameters of a recipe function as its file's text has them are those that Python sees."""

import inspect
from pathlib import Path

import pytest

from instep.recipe.arguments import signature_in

KNOWN = [
    "def recipe(): pass",
    "def recipe(a, b=1, *, c, d=[2], **rest): pass",
    "def recipe(a=(1, 2), /, b: int = 3, *more: int, c: str = 'x') -> None: pass",
    "import os\n\ndef other(recipe_=1): pass\n\ndef recipe(lr: float, width=8):\n    recipes = lr",
]
UNSURE = [
    "",
    "recipe = lambda lr: lr",
    "from there import recipe",
    "def recipe(a): pass\ndef recipe(b): pass",
    "def recipe(a): pass\nrecipe = print",
    "def recipe(a): pass\nfor recipe in (): pass",
    "@print\ndef recipe(a): pass",
    "if True:\n    def recipe(a): pass",
    "class recipe:\n    pass",
    "def recipe(a: pass",
    "\0",
]


@pytest.mark.parametrize("text", KNOWN)
def test_a_function_at_the_top_of_a_file_is_known_without_importing_it(tmp_path: Path, text: str):
    file = tmp_path / "recipes.py"
    file.write_text(text)
    found = signature_in(file, "recipe")
    assert found is not None
    module: dict = {}
    exec(text, module)
    wanted = inspect.signature(module["recipe"]).parameters
    assert list(found.parameters) == list(wanted)
    for one, other in zip(found.parameters.values(), wanted.values(), strict=True):
        assert (one.default is one.empty) == (other.default is other.empty)
        assert (one.kind is one.VAR_KEYWORD) == (other.kind is other.VAR_KEYWORD)
        assert (one.kind is one.VAR_POSITIONAL) == (other.kind is other.VAR_POSITIONAL)


@pytest.mark.parametrize("text", UNSURE)
def test_where_the_text_does_not_tell_importing_will(tmp_path: Path, text: str):
    file = tmp_path / "recipes.py"
    file.write_text(text)
    assert signature_in(file, "recipe") is None
    assert signature_in(tmp_path / "nothing.py", "recipe") is None
