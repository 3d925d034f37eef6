"""Runs of another format are refused by name, by every command that reads a run."""

import json
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import instep
from instep.cli import main
from instep.errors import CheckpointError, RunError
from instep.events import read_events
from instep.formats import FORMAT, INSTEP
from instep.job.start import StartSpec
from instep.recipe.start.file import start_file
from instep.state.files.manifest import CheckpointManifest, encode
from instep.store.folder import ID
from instep.store.run_folder import RunFolder
from made_up_runs import make_run, write_events

ROOT = Path(__file__).resolve().parents[3]


def of_format(path, number, written_by="0.1.3"):
    """A run whose job is of a format, and whose events say which instep wrote it."""
    make_run(path)
    (path / ID).write_text("made up\n")
    lines = (path / "job.toml").read_text().splitlines()
    assert lines[0] == f"format = {FORMAT}"
    lines[:1] = [f"format = {number}"] if number else []
    (path / "job.toml").write_text("\n".join(lines))
    events = list(read_events(path / "events.jsonl"))
    for event in events:
        if event["event"] == "run_started":
            event["versions"]["instep"] = written_by
    write_events(path, events)
    return path


def test_the_version_of_the_package_is_the_one_that_the_files_name():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert table["project"]["version"] == instep.__version__ == INSTEP


@pytest.mark.parametrize(
    "command",
    [
        "resume {run}",
        "report {run}",
        "report {new} {run}",
        "audit {run}",
        "audit {run} --json",
        "export {run} --to {run}.safetensors",
        "replay {run} --step 3",
        "chaos {run} --kills 1",
        "scale {run} --workers 3",
    ],
)
@pytest.mark.parametrize(
    ("number", "written_by", "says"),
    [
        (None, "0.1.3", "was written by instep 0.1.3 in format 1"),  # which format 1 did not say
        (3, "0.3.1", "was written by instep 0.3.1 in format 3"),
        (3, None, "was written in format 3"),
    ],
)
def test_every_command_that_reads_a_run_refuses_another_format(
    tmp_path, capsys, command, number, written_by, says
):
    run = of_format(tmp_path / "net", number, written_by)
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    words = command.format(run=run, new=make_run(tmp_path / "new")).split()
    assert main(words) == RunError.exit_code
    use = "instep " + written_by[:3] + " for it" if written_by else "the one that wrote it"
    assert capsys.readouterr().err == (
        f"instep: the run in {run} {says}; this is instep {INSTEP}, which reads format {FORMAT}. "
        f"Use {use}.\n"
    )
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == before


def test_a_model_is_not_taken_out_of_a_run_of_another_format(tmp_path, capsys):
    run = of_format(tmp_path / "net", None)
    save_file({}, run / "model.safetensors")
    recipe = ROOT / "examples/01_digits/digits.py"
    (tmp_path / "job.toml").write_text(f'recipe = "{recipe}:recipe"\n[start]\nmodel = "net"')
    words = ["run", str(tmp_path / "job.toml"), "--runs", str(tmp_path / "runs")]
    assert main(words) == RunError.exit_code
    assert f"the run in {run} was written by instep 0.1.3 in format 1" in capsys.readouterr().err


def test_a_model_is_not_taken_out_of_a_checkpoint_of_another_format(tmp_path):
    manifest = CheckpointManifest(
        version=1, step=7, instep="0.1.3", torch="2.12", files={}, facts={}
    )
    checkpoint = tmp_path / "step-00000007"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_bytes(encode(manifest))
    save_file({}, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"by instep 0\.1\.3 in format 1; .* instep 0\.1 for"):
        start_file(StartSpec(model=str(checkpoint)))
    (checkpoint / "manifest.json").write_bytes(encode(replace(manifest, version=FORMAT)))
    assert start_file(StartSpec(model=str(checkpoint))) == checkpoint / "model.safetensors"


def test_a_folder_of_ones_own_with_a_job_file_is_no_run(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "a.py:f"')
    save_file({}, tmp_path / "model.safetensors")
    assert start_file(StartSpec(model=str(tmp_path))) == tmp_path / "model.safetensors"


def test_a_job_file_of_ones_own_may_name_its_format(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text('format = 1\nrecipe = "a.py:f"\n[train]\nclip_norm = 1.0')
    assert main(["run", str(job)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"instep: {job} was written by instep 0.1 in format 1; this is instep ")
    job.write_text('format = "2"\nrecipe = "a.py:f"')
    assert main(["run", str(job)]) == 2
    assert 'format = "2": needs to be a whole number' in capsys.readouterr().err


@pytest.mark.parametrize("begin", [b"", b"\0", b"\xff" * 7, b"\0" * 300, b"\x93NUMPY" * 50])
def test_garbage_where_a_ledger_begins_is_no_traceback(tmp_path, capsys, begin):
    run = make_run(tmp_path / "net")
    (run / "ledger.bin").write_bytes(begin)
    assert main(["audit", str(run)]) == RunError.exit_code
    said = capsys.readouterr().err
    assert said.startswith("instep: ")
    assert said.count("\n") == 1


def test_events_that_do_not_say_who_wrote_them_are_no_traceback(tmp_path):
    run = of_format(tmp_path / "net", None)
    for events in ("", "no json\n", '{"event": "run_started", "time": 1, "versions": []}\n'):
        (run / "events.jsonl").write_text(events)
        with pytest.raises(RunError, match=r"was written by instep 0\.1 in format 1; "):
            RunFolder(run)
    (run / "events.jsonl").write_text(
        json.dumps({"event": "run_started", "time": 1, "versions": {"instep": "../0.1\n"}}) + "\n"
    )
    with pytest.raises(RunError, match=r"was written by instep 0\.1 in format 1; "):
        RunFolder(run)


def test_a_folder_with_a_job_file_of_the_users_own_is_no_run(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "net.py:recipe"\n')
    with pytest.raises(RunError, match="is not the folder of a run") as error:
        RunFolder(tmp_path)
    assert "runs/NAME" in str(error.value)
