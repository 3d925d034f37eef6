"""`instep report` and `instep export`, on a run that has really been."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from started import Started

from instep.cli import main

pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]


@pytest.fixture
def runs(finished: Started, tmp_path: Path) -> Path:
    """A folder with two runs in it, `tested` and `other`, to do as one likes with."""
    for name in ("tested", "other"):
        shutil.copytree(finished.run, tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.mark.tail
def test_report_writes_the_page_again_and_says_where(runs: Path, capsys: Out) -> None:
    page = runs / "tested" / "report.html"
    page.unlink()
    assert main(["report", str(runs / "tested")]) == 0
    assert "21 steps" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_report_of_two_runs_is_a_page_of_its_own(runs: Path, capsys: Out) -> None:
    assert main(["report", str(runs / "tested"), str(runs / "other"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["report"] == str(runs / "tested" / "report-with-other.html")
    assert said["steps"] == 21
    assert "other" in Path(said["report"]).read_text()


def test_report_of_a_crashed_run_shows_what_there_is(runs: Path, capsys: Out) -> None:
    events = runs / "tested" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]) + '{"time": 1')
    assert main(["report", str(runs / "tested")]) == 0
    assert "killed, or its machine went down" in capsys.readouterr().out


def test_audit_of_a_real_run_proves_it_exact(runs: Path, capsys: Out) -> None:
    assert main(["audit", str(runs / "tested")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("covers  completed, 21 of 21 steps committed, 42 records in")
    assert lines[1] == "epoch   1 to 3: 101 samples each, each exactly once"
    assert lines[-1] == f"next    instep report {runs / 'tested'}"


def test_export_copies_the_model_and_makes_the_folder_for_it(runs: Path, capsys: Out) -> None:
    target = runs / "new" / "folder" / "mine.safetensors"
    assert main(["export", str(runs / "tested"), "--to", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    assert load_file(target).keys() == load_file(runs / "tested" / "model.safetensors").keys()
    assert [path.name for path in target.parent.iterdir()] == ["mine.safetensors"]


@pytest.mark.parametrize("command", ["report", "audit", "export"])
def test_a_run_that_does_not_exist_is_answered_with_the_near_miss(
    command: str, runs: Path, capsys: Out
) -> None:
    to = ["--to", "m.safetensors"] if command == "export" else []
    assert main([command, str(runs / "testd"), *to]) == 6
    message = capsys.readouterr().err
    assert f"there is no run at '{runs / 'testd'}'. Did you mean 'tested'?" in message


def test_a_folder_that_is_no_run_is_refused(runs: Path, capsys: Out) -> None:
    assert main(["report", str(runs)]) == 6
    assert "is not the folder of a run: it holds no job.toml" in capsys.readouterr().err
    (runs / "tested" / "job.toml").write_text("name = 3\n")
    assert main(["report", str(runs / "tested")]) == 6
    assert "cannot be read as a run" in capsys.readouterr().err


def test_the_second_run_of_a_report_is_checked_like_the_first(runs: Path, capsys: Out) -> None:
    assert main(["report", str(runs / "tested"), str(runs / "othr")]) == 6
    assert "Did you mean 'other'?" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_one_sentence(runs: Path, capsys: Out) -> None:
    assert main(["report", str(runs / "tested"), "--to", str(runs)]) == 6
    message = capsys.readouterr().err
    assert message.startswith(f"instep: {runs} cannot be written: ")
    assert message.count("\n") == 1


def test_export_wants_a_safetensors_file_that_can_be_written(runs: Path, capsys: Out) -> None:
    run = str(runs / "tested")
    assert main(["export", run, "--to", "model.pt"]) == 2
    assert "'model.pt': the file's name needs to end in .safetensors" in capsys.readouterr().err
    own = runs / "tested" / "model.safetensors"
    before = own.read_bytes()
    assert main(["export", run, "--to", str(own)]) == 2
    assert f"--to '{own}' lies in the run folder" in capsys.readouterr().err
    assert own.read_bytes() == before
    (runs / "a-file").touch()
    below_a_file = runs / "a-file" / "model.safetensors"
    assert main(["export", run, "--to", str(below_a_file)]) == 6
    assert f"{below_a_file} cannot be written: " in capsys.readouterr().err


def test_a_run_without_a_model_says_how_it_ended(runs: Path, capsys: Out) -> None:
    (runs / "tested" / "model.safetensors").unlink()
    assert main(["export", str(runs / "tested"), "--to", str(runs / "m.safetensors")]) == 6
    assert "has no model: the run is completed" in capsys.readouterr().err


def test_no_command_writes_over_a_file_of_a_run(
    runs: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as it is, through a link, or from elsewhere; of this run or of another."""
    monkeypatch.chdir(runs)
    (runs / "link.html").symlink_to(runs / "tested" / "ledger.bin")
    (runs / "recipe.py").write_text("def recipe(): ...")
    before = {p: p.read_bytes() for p in runs.rglob("*") if p.is_file()}
    for name in ("ledger.bin", "job.toml", "events.jsonl", "checkpoints/report.html", "a.html"):
        for run in ("tested", "other"):
            assert main(["report", "tested", "--to", f"{run}/{name}"]) == 2
            assert f"--to '{run}/{name}' lies in the run folder" in capsys.readouterr().err
    assert main(["report", "tested", "--to", "link.html"]) == 2
    assert main(["report", "tested", "--to", "other/report.html"]) == 2
    assert main(["report", "tested", "--to", "recipe.py"]) == 2
    assert "recipe.py' exists already, and is no HTML page" in capsys.readouterr().err
    assert main(["export", "tested", "--to", "other/model.safetensors"]) == 2
    step = ["--step", "1", "--to", "other/model.safetensors"]
    assert main(["replay", "tested", *step]) == 2
    assert {p: p.read_bytes() for p in runs.rglob("*") if p.is_file()} == before
    for name in ("tested/report.html", "tested/report-with-me.html", "new/page.html"):
        assert main(["report", "tested", "--to", name]) == 0
        assert main(["report", "tested", "--to", name]) == 0
    (runs / "tested" / "report.html").unlink()
    (runs / "tested" / "report.html").symlink_to("ledger.bin")
    assert main(["report", "tested"]) == 0
    assert (runs / "tested" / "ledger.bin").read_bytes() == before[runs / "tested" / "ledger.bin"]


def test_a_damaged_model_is_neither_exported_nor_started_from(runs: Path, capsys: Out) -> None:
    model = runs / "tested" / "model.safetensors"
    damaged = bytearray(model.read_bytes())
    damaged[-1] ^= 16
    model.write_bytes(damaged)
    target = runs / "m.safetensors"
    assert main(["export", str(runs / "tested"), "--to", str(target)]) == 7
    said = capsys.readouterr().err
    assert f"{model} is damaged: its SHA-256 is " in said
    assert "instep export" in said  # the checkpoint of its last step has it still
    assert not target.exists()
    assert main(["export", str(runs / "tested"), "--step", "21", "--to", str(target)]) == 0
    job = runs / "job.toml"
    for start in (runs / "tested", model):
        recipe = Path(__file__).parent / "recipes" / "tiny.py"
        job.write_text(f'recipe = "{recipe}:recipe"\n[start]\nmodel = "{start}"\n')
        assert main(["run", str(job), "--runs", str(runs / "new")]) == 7
        assert "is damaged: its SHA-256 is " in capsys.readouterr().err
    assert not (runs / "new").exists()


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_a_model_that_was_cut_is_named_and_not_the_copy_that_was_begun(
    runs: Path, capsys: Out, size: int
) -> None:
    model = runs / "tested" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:size])
    target = runs / "m.safetensors"
    assert main(["export", str(runs / "tested"), "--to", str(target)]) == 7
    said = capsys.readouterr().err
    assert f"instep: {model} is " in said
    assert ".part" not in said
    assert [path.name for path in runs.glob("m.*")] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_answer_for_which_there_is_no_room_is_said_to_be_that(finished: Started) -> None:
    command = [sys.executable, "-u", "-m", "instep", "audit", str(finished.run)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"instep: the answer cannot be written: No space left on device.\n"
