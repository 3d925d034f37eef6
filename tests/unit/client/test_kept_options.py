"""A run goes on with the options that it began with, whatever another version has by default."""

from pathlib import Path

import pytest

import instep
from instep.client.job_checks import with_options
from instep.control.changed_job import changed, check_changes
from instep.errors import SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.job.sync.rounds import RoundSpec
from instep.job.sync.tables import CODEC_ROWS, STRATEGY_ROWS
from instep.store.folder import make_run_folder
from instep.store.run_folder import RunFolder
from instep.sync.base import strategy_of


def job_with(**sync: object) -> JobSpec:
    return spec_file.build({"recipe": "a.py:f", "sync": sync}, source="a test")


def begun(tmp_path: Path, job: JobSpec) -> RunFolder:
    return RunFolder(make_run_folder(tmp_path, with_options(job), named=True))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return begun(tmp_path, job_with(**GIVEN))


GIVEN = {
    "name": "diloco",
    "codec": "int4",
    "options": {"outer_momentum": 0.5},
    "codec_options": {"rounding": "random"},
}


@pytest.fixture
def another_version(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once that run has begun, defaults are others."""
    int4, diloco = CODEC_ROWS["int4"], STRATEGY_ROWS["diloco"]
    int4 = int4._replace(options={"block": 32, "rounding": "nearest"})
    diloco = diloco._replace(options={"outer_lr": 0.1}, rounds=RoundSpec(local_steps=3))
    monkeypatch.setitem(CODEC_ROWS, "int4", int4)
    monkeypatch.setitem(STRATEGY_ROWS, "diloco", diloco)


def resumed(run: RunFolder, *overrides: str) -> SyncSpec:
    return with_options(changed(run, overrides), run.spec).sync


@pytest.mark.usefixtures("another_version")
def test_a_run_goes_on_with_what_the_version_had_that_began_it(run: RunFolder) -> None:
    sync = resumed(run)
    assert sync == run.spec.sync
    assert sync.all_codec_options == {"block": 64, "rounding": "random"}
    assert sync.rounds == RoundSpec(local_steps=20, local_optimizers="kept")
    assert sync.all_options["outer_lr"] == 0.7
    strategy_of(sync)  # takes them all


@pytest.mark.usefixtures("another_version")
def test_a_script_that_joins_again_goes_on_with_them_too(run: RunFolder) -> None:
    assert with_options(job_with(**GIVEN), run.spec).sync == run.spec.sync
    said = GIVEN | {"codec_options": {"rounding": "random", "block": 64}}
    check_changes(run.spec, with_options(job_with(**said), run.spec))
    with pytest.raises(SpecError, match=r"sync\.name was 'diloco' and cannot become 'all_reduce'"):
        check_changes(run.spec, with_options(job_with(codec="int8"), run.spec))
    with pytest.raises(SpecError, match=r"sync\.codec_options\.block was 64 and cannot become 16"):
        resumed(run, "sync.codec_options.block=16")


def test_what_was_left_out_of_one_codec_is_not_given_to_another(tmp_path: Path) -> None:
    run = begun(tmp_path, job_with(codec="int8"))
    file = run.path / "job.toml"
    file.write_text(file.read_text().replace('codec = "int8"', 'codec = "int4"'))
    sync = resumed(RunFolder(run.path))
    assert sync.all_codec_options == {"block": 64, "rounding": "nearest"}
    assert sync.defaults["int4"] == sync.all_codec_options  # for the next resume
    file.write_text(file.read_text().replace('codec = "int4"', 'codec = "top_k"'))
    assert resumed(RunFolder(run.path)).all_codec_options == {"density": 0.01}


def test_a_run_of_before_keeps_that_it_left_them_out() -> None:
    job = job_with(codec="int4")
    assert with_options(job, job) == job


def test_nothing_is_added_where_there_is_nothing_to_add() -> None:
    for codec in ("none", "bfloat16", "my_codecs:Own"):
        assert list(with_options(job_with(codec=codec)).sync.defaults) == ["all_reduce"]


def test_a_run_again_of_a_runs_job_has_them(run: RunFolder) -> None:
    assert with_options(run.spec) == run.spec


@pytest.mark.tail
@pytest.mark.process
def test_a_run_writes_them_down(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "process/recipes/slow_tiny.py"
    train = {"steps": 2, "global_batch": 16}
    run = instep.train(
        f"{recipe}:recipe", workers=1, runs=tmp_path, quiet=True, train=train,
        sync={"codec": "top_k"}, arguments={"pause_s": 0.0},
    )  # fmt: skip
    assert RunFolder(run.path).spec.sync.defaults["top_k"] == {"density": 0.01}
