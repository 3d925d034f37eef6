"""`instep run --check-determinism`: says yes where it is so, and otherwise what differs and why."""

import json
from pathlib import Path

import pytest
from started import RECIPES

from instep.cli import main

pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]


def check(folder: Path, recipe: str, *options: str) -> int:
    job = folder / "job.toml"
    job.write_text(f'recipe = "{RECIPES / recipe}"\n[train]\nglobal_batch = 16\n')
    return main(["run", str(job), "--check-determinism", *options])


def test_a_recipe_that_gives_the_same_bits_is_told_so(tmp_path: Path, capsys: Out) -> None:
    assert check(tmp_path, "tiny.py:recipe", "--workers", "3", "--json") == 0
    said = capsys.readouterr()
    assert "the same bits on 1 and 3 workers: losses and 9 tensors, after each of 3" in said.err
    answer = json.loads(said.out)
    assert answer["deterministic"] is True
    assert answer["difference"] is None
    assert list(tmp_path.iterdir()) == [tmp_path / "job.toml"]


@pytest.mark.parametrize(
    ("model", "what", "why"),
    [
        ("seeded", "the loss of step 1 is", "carried from batch to batch"),
        ("unseeded", "the loss of step 1 is", "a generator of its own without a seed"),
        ("counting", "after step 1, 'body.bias' of the model differs", "carried from batch"),
    ],
)
def test_what_differs_is_named_with_where_to_look(
    tmp_path: Path, capsys: Out, model: str, what: str, why: str
) -> None:
    assert check(tmp_path, "carries_state.py:recipe", "--set", f"arguments.model={model}") == 3
    said = capsys.readouterr().out
    assert what in said
    assert why in said


def test_one_micro_batch_cannot_be_compared(tmp_path: Path, capsys: Out) -> None:
    options = ("--workers", "1", "--set", "train.micro_batches=1")
    assert check(tmp_path, "tiny.py:recipe", *options) == 2
    assert "there must be work for two workers" in capsys.readouterr().err
