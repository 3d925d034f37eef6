"""Alternatives of a job: what is typed becomes jobs of as many samples, or one clear sentence."""

import re

import pytest

from instep.errors import SpecError
from instep.lab.alternatives import UNCHANGED, alternatives_of, split


@pytest.fixture
def job(tmp_path):
    (tmp_path / "net.py").write_text("")
    file = tmp_path / "job.toml"
    file.write_text(
        'recipe = "net.py:recipe"\n[train]\nsteps = 96\nglobal_batch = 16\nvalidate_every = 10\n'
        "[checkpoint]\nevery = 24\n"
    )
    return file


ROUNDS = "sync.name=averaging,sync.participants=4,sync.options.local_steps=8"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.b=1", ["a.b=1"]),
        ("a.b=1, c=2", ["a.b=1", "c=2"]),
        ('a.b=[1,2],c={x=1,y="},"},d=3', ["a.b=[1,2]", 'c={x=1,y="},"}', "d=3"]),
        ("""a='x,y',b="u\\",v",c=1""", ["a='x,y'", 'b="u\\",v"', "c=1"]),
    ],
)
def test_commas_part_settings_but_not_within_quotes_and_brackets(text, parts):
    assert split(text) == parts


def test_the_unchanged_job_is_first_and_each_change_is_one_more(job):
    first, int8, one = alternatives_of(
        job, ["seed=3"], ["sync.codec=int8,sync.codec_options={block=512}", "workers=1"]
    )
    assert (first.name, first.job.sync.codec, first.job.seed) == (UNCHANGED, "none", 3)
    assert (int8.job.sync.codec, int8.job.sync.codec_options) == ("int8", {"block": 512})
    assert (int8.job.seed, one.job.workers, one.job.sync.codec) == (3, 1, "none")
    assert len({each.folder for each in (first, int8, one)}) == 3


def test_rounds_take_as_many_samples_as_steps_do(job):
    base, rounds = (each.job for each in alternatives_of(job, [], [ROUNDS]))
    taken = [each.train.steps * each.per_commit.global_batch for each in (base, rounds)]
    assert taken == [96 * 16, 96 * 16]
    assert rounds.train.steps == 12
    assert rounds.train.validate_every == 1  # 10 steps are 1.25 rounds
    assert rounds.checkpoint.every == 3


def test_another_batch_takes_as_many_samples_too_and_epochs_stay(job):
    _, large = alternatives_of(job, [], ["train.global_batch=64"])
    assert large.job.train.steps == 24
    _, rounds = alternatives_of(job, ["train.epochs=3"], [ROUNDS])
    assert (rounds.job.train.epochs, rounds.job.train.steps) == (3, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], "nothing to compare"),
        (["sync.codec"], "'sync.codec' is not of the form section.key=value"),
        (["sync.cdec=int8"], "Did you mean 'codec'"),
        (["sync.codec=int9"], "no codec is called 'int9'"),
        (["sync.codec=int8,train.determinism=bits"], "does not go with"),
        (["train.steps=4"], "--set train.steps=4"),
        (["seed=0"], "the same job as unchanged"),
        (["name=other"], "the same job as unchanged"),
        (["sync.codec=int8", "sync.codec='int8'"], "the same job as sync.codec=int8"),
        ([ROUNDS.replace("8", "7")], "--set train.steps=98"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(job, changes, told):
    with pytest.raises(SpecError, match=re.escape(told)) as refused:
        alternatives_of(job, [], changes)
    if changes:
        assert str(refused.value).startswith(f"--with {changes[-1]}: ")
