"""`instep clean`: what it removes of runs that are over, and that it touches no other."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from instep.cli import main
from instep.errors import RunError, SpecError
from instep.state.files.staging import save_tensors
from instep.store import cleaning
from instep.store.cleaning import Kinds, removals, remove
from instep.store.folder import ID, held
from made_up_runs import make_run, write_events


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def run_of(path, outcome="completed", *, age_s=3600.0, **made):
    """A run that is over, with two checkpoints and what a kill may leave."""
    make_run(path, outcome=outcome, **made)
    (path / ID).write_text("made up\n")
    for name in ("step-00000016", "step-00000032", ".saving-step-00000048", ".deleting-step-1"):
        (path / "checkpoints" / name).mkdir()
        (path / "checkpoints" / name / "model.safetensors").write_bytes(b"x" * 100)
    save_tensors(path / "model.safetensors", {"weight": torch.ones(3)}, {})
    (path / ".saving-model.safetensors").write_bytes(b"half")
    for file in [*path.rglob("*"), path]:
        os.utime(file, (time.time() - age_s, time.time() - age_s))
    return path


def nothing_came(path):
    """A run that was killed before its first step."""
    make_run(path, outcome=None)
    lines = (path / "events.jsonl").read_text().splitlines()
    write_events(path, [json.loads(lines[0])])
    for name in ("ledger.bin", "steps.bin", "summary.json"):
        (path / name).unlink(missing_ok=True)
    (path / ID).write_text("made up\n")
    (path / "logs" / "worker-0.log").write_text("loading\n")
    for file in path.rglob("*"):
        os.utime(file, (time.time() - 3600,) * 2)
    return path


SCRAPS = {
    "checkpoints/.saving-step-00000048/model.safetensors",
    "checkpoints/.deleting-step-1/model.safetensors",
    ".saving-model.safetensors",
}
CHECKPOINTS = {f"checkpoints/step-{step:08}/model.safetensors" for step in (16, 32)}


def cleaned(runs, **kinds):
    found, alone = removals(runs, Kinds(**kinds))
    gone, not_removed = remove(found, Kinds(**kinds))
    assert [each.path for each in gone] == [each.path for each in found]
    assert not_removed == []
    return found, alone


@pytest.mark.parametrize("outcome", ["completed", "failed", "interrupted", None])
def test_only_what_no_command_reads_goes_without_options(tmp_path, outcome):
    run = run_of(tmp_path / "net", outcome)
    before = files_of(run)
    found, alone = cleaned(tmp_path)
    assert files_of(run) == before - SCRAPS
    assert sum(each.size_bytes for each in found) == 204
    assert alone == []


@pytest.mark.parametrize(
    ("outcome", "go"), [("completed", True), ("stopped", True), ("failed", False), (None, False)]
)
def test_checkpoints_go_if_the_run_ended_well_and_its_model_is_whole(tmp_path, outcome, go):
    run = run_of(tmp_path / "net", outcome)
    cleaned(tmp_path, checkpoints=True)
    assert bool(CHECKPOINTS & files_of(run)) is not go
    assert "model.safetensors" in files_of(run)


def test_checkpoints_of_a_run_that_diverged_stay_as_one_may_be_all_that_is_finite(tmp_path):
    run, told = run_of(tmp_path / "net", nan_from=40), run_of(tmp_path / "told", "stopped")
    events = [json.loads(line) for line in (told / "events.jsonl").read_text().splitlines()]
    write_events(told, [{**e, "rule": "diverged"} if "rule" in e else e for e in events])
    for file in (told / "events.jsonl", told / "ledger.bin"):
        os.utime(file, (time.time() - 3600,) * 2)
    cleaned(tmp_path, checkpoints=True)
    for each in (run, told):
        assert files_of(each) >= CHECKPOINTS


def test_checkpoints_stay_beside_a_model_that_is_damaged_or_not_there(tmp_path):
    damaged, gone = run_of(tmp_path / "damaged"), run_of(tmp_path / "gone")
    model = damaged / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\1")
    (gone / "model.safetensors").unlink()
    cleaned(tmp_path, checkpoints=True)
    assert files_of(damaged) >= CHECKPOINTS
    assert files_of(gone) >= CHECKPOINTS


def test_folders_go_of_runs_of_which_nothing_came_and_of_failed_ones_if_asked_for(tmp_path):
    for name in ("kept", "failed"):
        run = run_of(tmp_path / name, "failed")
        if name == "failed":
            for step in (16, 32):
                (run / f"checkpoints/step-{step:08}/model.safetensors").unlink()
                (run / f"checkpoints/step-{step:08}").rmdir()
    nothing_came(tmp_path / "nothing")
    cleaned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "failed"}
    cleaned(tmp_path, failed=True)
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}


def test_a_run_that_is_running_is_left_alone(tmp_path):
    run = run_of(tmp_path / "net")
    before = files_of(run)
    every = Kinds(checkpoints=True, failed=True)
    found, _ = removals(tmp_path, every)
    with held(run):
        assert removals(tmp_path, every)[0] == []
        gone, alone = remove(found, every)  # it was resumed while the user was asked
    assert gone == []
    assert "it is running" in alone[0]
    assert files_of(run) == before


def test_a_run_is_locked_while_something_of_it_is_removed(tmp_path, monkeypatch):
    run_of(tmp_path / "net")
    try_it = (
        f"from instep.store.folder import *; print(is_running(Path({str(tmp_path / 'net')!r})))"
    )
    said = list[str]()

    def delete(path):
        said.append(subprocess.check_output([sys.executable, "-c", try_it], text=True).strip())

    monkeypatch.setattr(cleaning, "_delete", delete)
    remove(removals(tmp_path, Kinds())[0], Kinds())
    assert said == ["True"] * 3


def test_a_run_that_was_just_killed_or_is_a_link_is_left_alone(tmp_path):
    runs = tmp_path / "runs"
    run_of(runs / "killed", None, age_s=1)
    (runs / "link").symlink_to(run_of(tmp_path / "elsewhere"))
    found, alone = removals(runs, Kinds(checkpoints=True))
    assert found == []
    assert "it was killed, or is running elsewhere, within the last 60 s" in alone[0]
    assert "link is left alone: it is a link" in alone[1]


def test_what_is_new_since_it_was_shown_stays(tmp_path):
    run = run_of(tmp_path / "net")
    found, _ = removals(tmp_path, Kinds())
    (run / "checkpoints" / ".saving-new").write_text("new")
    gone, _ = remove(found, Kinds())
    assert len(gone) == 3
    assert (run / "checkpoints" / ".saving-new").exists()


def test_a_link_goes_and_not_what_it_leads_to(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    run = run_of(tmp_path / "runs" / "net")
    (run / "checkpoints" / ".deleting-link").symlink_to(outside)
    cleaned(tmp_path / "runs")
    assert (outside / "file").read_text() == "mine"
    assert not (run / "checkpoints" / ".deleting-link").is_symlink()


def test_the_command_shows_asks_and_says_what_is_gone(tmp_path, capsys, monkeypatch):
    run = run_of(tmp_path / "net")
    before = files_of(run)
    assert main(["clean", str(tmp_path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("would remove 3 paths, 204 B\n")
    assert f"{run / '.saving-model.safetensors'}   half written" in shown
    assert main(["clean", str(tmp_path)]) == SpecError.exit_code
    assert "add --yes, or --dry-run" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, said in (("n", "nothing was removed"), ("y", "removed 3 paths, 204 B")):
        assert files_of(run) == before
        monkeypatch.setattr(
            sys.stdin, "readline", lambda answer=answer: f"{answer}\n", raising=False
        )
        assert main(["clean", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == said
    assert files_of(run) == before - SCRAPS
    assert main(["clean", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_json_has_what_was_found_and_what_is_gone(tmp_path, capsys):
    run_of(tmp_path / "net")
    assert main(["clean", str(tmp_path), "--json"]) == SpecError.exit_code
    assert "--json asks no question" in capsys.readouterr().err
    assert main(["clean", str(tmp_path), "--json", "--yes"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["found"]) == len(answer["removed"]) == 3
    assert answer["left_alone"] == []


@pytest.mark.parametrize(("where", "said"), [("nowhere", "no folder"), ("net", "a run itself")])
def test_what_is_no_folder_of_runs_is_said(tmp_path, where, said):
    run_of(tmp_path / "net")
    with pytest.raises(RunError, match=said):
        removals(tmp_path / where, Kinds())
