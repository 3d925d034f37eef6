"""All that is wrong with a job's tables is told at once, and nothing that only follows from it."""

import copy

import pytest

from instep.errors import SpecError
from instep.job.every_refusal import every_refusal, load_all
from instep.job.file import build
from instep.job.spec import JobSpec

GOOD = {"recipe": "net.py:recipe", "workers": 2, "train": {"epochs": 3, "global_batch": 32}}


def refused(table, **options):
    before = copy.deepcopy(table)
    found = every_refusal(table, source="job.toml", **options)
    assert table == before
    return found


def texts(table, **options):
    return [str(error) for error in refused(table, **options).errors]


def test_a_good_job_is_the_job_that_is_built():
    found = refused(GOOD)
    assert found.errors == []
    assert found.job == build(GOOD, source="job.toml")
    assert found.has_recipe


def test_mistakes_of_several_sections_are_told_in_one_go():
    table = {
        **GOOD,
        "workers": "two",
        "train": {"epochs": -1, "batch_size": 8, "determinism": "bit"},
        "data": {"loaders": "many"},
        "check": {"stict": True},
    }
    told = texts(table)
    assert len(told) == 6
    for words in (
        'workers = "two"',
        "train.epochs = -1",
        "[train] has no key 'batch_size'",
        'train.determinism = "bit"',
        "data.loaders",
        "[check] has no key 'stict'",
    ):
        assert sum(words in text for text in told) == 1, words


def test_the_first_one_is_what_build_raises():
    for table in (
        {**GOOD, "train": {"epochs": 0, "steps": "x"}},
        {**GOOD, "train": {"epochs": 2, "steps": 5}, "workers": 0},
        {"workers": 3},
    ):
        with pytest.raises(SpecError) as error:
            build(table, source="job.toml")
        assert texts(table)[0] == str(error.value)


def test_several_rules_of_one_section_are_each_told():
    train = {"epochs": 2, "steps": 5, "batch_norm": "global", "merge": "never"}
    told = texts({**GOOD, "train": train})
    assert any("both epochs = 2 and steps = 5" in text for text in told)
    assert any("batch_norm = 'global' with merge = 'never'" in text for text in told)
    assert len(told) == 2


def test_what_only_follows_from_a_wrong_key_is_not_told():
    table = {**GOOD, "train": {"determinism": "bit"}, "check": {"corruption": True}}
    told = texts(table)  # corruption needs "bits", which is what was meant
    assert len(told) == 1
    assert "train.determinism" in told[0]


def test_rules_across_sections_leave_a_job_that_can_be_checked_further():
    table = {**GOOD, "workers": 5, "mesh": {"shard": 2}, "train": {"micro_batches": 99}}
    found = refused(table)
    assert str(found.errors[0]).startswith("job.toml: train.micro_batches = 99")
    assert any("a replica has 2 processes" in str(error) for error in found.errors)
    assert isinstance(found.job, JobSpec)
    assert "train.micro_batches" in found.left_out


def test_a_job_without_a_recipe_has_the_rest_checked():
    found = refused({"workers": 0, "train": {"epochs": "x"}})
    told = [str(error) for error in found.errors]
    assert len(told) == 3
    assert any("the key 'recipe' is missing" in text for text in told)
    assert found.job is not None
    assert not found.has_recipe


def test_what_was_typed_is_named_in_each():
    typed = {"train.epochs": "--set train.epochs=x", "workers": "--workers 0"}
    told = texts({**GOOD, "workers": 0, "train": {"epochs": "x"}}, typed=typed)
    assert sorted(text.partition(": ")[0] for text in told) == [
        "--set train.epochs=x",
        "--workers 0",
    ]


def test_a_file_is_read_with_overrides_and_absolute_paths(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "net.py:recipe"\n[train]\nepochs = 0\n')
    found = load_all(tmp_path / "job.toml", ["data.loaders=-1"])
    assert len(found.errors) == 2
    assert found.job.recipe == f"{tmp_path / 'net.py'}:recipe"


def test_a_file_that_is_no_toml_is_refused_as_for_a_run(tmp_path):
    (tmp_path / "job.toml").write_text("recipe = ")
    with pytest.raises(SpecError, match="is not valid TOML"):
        load_all(tmp_path / "job.toml")
