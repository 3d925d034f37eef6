"""All reasons why a job cannot run, from the generators that a run takes the first of."""

import pytest

from instep.client.job_checks import check_job, refusals
from instep.errors import InstepError, SpecError, raise_all
from instep.job.file import build
from instep.sync import clashes


@pytest.fixture
def job(tmp_path):
    """`job(**sections)`: one whose recipe is there."""
    (tmp_path / "net.py").write_text("def recipe(lr=0.1): ...\n")

    def made(**sections):
        table = {"recipe": f"{tmp_path / 'net.py'}:recipe", **sections}
        return build(table, source="a test")

    return made


WRONG = {
    "sync": {"participants": 4, "servers": 2, "codec": "int7"},
    "mesh": {"zero": 2, "checkpointing": "blocks"},
    "data": {"parts": 2, "groups": "g", "split": "random"},
    "report": {"loggers": ["csvv"]},
    "arguments": {"rate": 1},
}


def test_every_reason_is_told_and_a_run_raises_the_first(job):
    wrong = job(**WRONG)
    found = [str(error) for error in refusals(wrong)]
    for words in (
        "'int7'",
        "csvv",
        "data.parts = 2",
        "data.groups = 'g'",
        "sync.participants = 4",
        "sync.servers = 2",
        "mesh.zero = 2",
        "mesh.checkpointing",
        "'rate'",
    ):
        assert any(words in text for text in found), words
    with pytest.raises(InstepError) as error:
        check_job(wrong)
    assert str(error.value) == found[0]


def test_a_good_job_has_none(job):
    assert [*refusals(job(sync={"name": "averaging"}))] == []


def test_an_unknown_strategy_hides_what_depends_on_it(job):
    found = [str(error) for error in refusals(job(sync={"name": "averagin", "participants": 3}))]
    assert len(found) == 1
    assert "Did you mean 'averaging'" in found[0]


def test_reasons_are_looked_for_one_at_a_time(job):
    """A run must not do more than it did: what follows the first refusal may import torch."""
    found = refusals(job(**WRONG))
    assert "codec" in str(next(found))
    found.close()


def test_all_pairs_that_clash_are_told(job):
    pairs = {"train": {"determinism": "bits"}, "sync": {"codec": "int8"}}
    both = job(**pairs, check={"corruption": True})
    assert len([*clashes.refusals(both)]) == 2
    with pytest.raises(SpecError) as error:
        clashes.check(both)
    assert str(error.value) == str(next(clashes.refusals(both)))


def test_the_first_of_several_carries_the_others():
    one, other = SpecError("one."), SpecError("other.")
    with pytest.raises(SpecError, match="one") as error:
        raise_all([one, other])
    assert error.value.beside == (other,)
    raise_all([])
