"""A run goes on with the options that it began with, whatever another version has by default."""

from pathlib import Path

import pytest

import instep
from instep import spec_file
from instep.client.job_checks import with_options
from instep.comm.codecs import DEFAULTS
from instep.control.resume import changed, check_changes
from instep.errors import SpecError
from instep.spec import JobSpec
from instep.store.folder import make_run_folder
from instep.store.run_folder import RunFolder


def job_with(**sync: object) -> JobSpec:
    return spec_file.build({"recipe": "a.py:f", "sync": sync}, source="a test")


def test_options_that_a_job_leaves_out_are_those_of_the_version_that_begins_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_with(codec="int4", codec_options={"rounding": "random"})
    began = with_options(job)
    assert began.sync.codec_options == {"block": 128, "rounding": "random"}
    run = RunFolder(make_run_folder(tmp_path, began, named=True))
    monkeypatch.setitem(DEFAULTS, "int4", {"block": 64, "rounding": "nearest"})
    assert changed(run, []).sync == began.sync
    assert with_options(job, run.spec).sync == began.sync  # of a script that joins again
    with pytest.raises(SpecError, match=r"sync was .* and cannot become"):
        check_changes(run.spec, with_options(job_with(codec="int8"), run.spec))


def test_a_run_of_before_keeps_that_it_left_them_out() -> None:
    job = job_with(codec="int4")
    assert with_options(job, job) == job


def test_nothing_is_added_where_there_is_nothing_to_add() -> None:
    for codec in ("none", "bfloat16", "my_codecs:Own"):
        assert with_options(job_with(codec=codec)) == job_with(codec=codec)


@pytest.mark.process
def test_a_run_writes_them_down(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "process/recipes/slow_tiny.py"
    train = {"steps": 2, "global_batch": 16}
    run = instep.train(
        f"{recipe}:recipe", workers=1, runs=tmp_path, quiet=True, train=train,
        sync={"codec": "top_k"}, arguments={"pause_s": 0.0},
    )  # fmt: skip
    assert RunFolder(run.path).spec.sync.codec_options == {"density": 0.01}
