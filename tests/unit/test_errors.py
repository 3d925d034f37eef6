"""The tree of errors: exit codes, near misses, and whose line it was."""

import re

import pytest

from instep import errors
from instep.errors import InstepError, near_miss

TREE = {
    "InstepError": 1,
    "SpecError": 2,
    "RecipeError": 3,
    "DataError": 4,
    "WorkerError": 5,
    "Unrepeatable": 5,
    "PeerError": 5,
    "StrangerError": 5,
    "RunError": 6,
    "CheckpointError": 7,
    "JoinError": 9,
}
CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, InstepError)
}


def test_every_error_has_its_documented_exit_code():
    assert {name: cls.exit_code for name, cls in CLASSES.items()} == TREE


@pytest.mark.parametrize("name", TREE)
def test_the_drawn_tree_and_the_classes_agree(name):
    assert re.search(rf"{name} +{TREE[name]}\b", errors.__doc__)


def test_an_interrupted_run_ends_as_shells_expect():
    assert errors.INTERRUPTED == 128 + 2


@pytest.mark.parametrize(
    ("given", "known", "sentence"),
    [
        ("topk", ["top_k", "half"], "Did you mean 'top_k'? Known: half, top_k."),
        ("zzz", ["top_k", "half"], "Known: half, top_k."),
        ("anything", [], "There are none."),
        ("half", iter(["half"]), "Did you mean 'half'? Known: half."),
    ],
)
def test_a_wrong_name_answers_with_the_near_miss_and_the_list(given, known, sentence):
    assert near_miss(given, known) == sentence
