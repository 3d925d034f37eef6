"""A run goes on where it stopped, however it was stopped and at whatever size, or says why not."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from started import RECIPES, Start, distance

import instep
from disks import put
from instep.cli import main
from instep.errors import CheckpointError, RunError, SpecError
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

JOB: dict[str, Any] = {
    "seed": 5,
    "quiet": True,
    "train": {"epochs": 6, "global_batch": 16, "determinism": "bits"},
    "checkpoint": {"every": 5},
}  # 42 steps, 7 an epoch


def begin(runs: Path, name: str, **changes: Any) -> Path:
    """A run of tiny.py; sections are laid over `JOB`'s."""
    job = {**JOB, **changes}
    for section in ("train", "checkpoint"):
        job[section] = {**JOB[section], **changes.get(section, {})}
    return instep.train(f"{RECIPES / 'tiny.py'}:recipe", name=name, runs=runs, **job).path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("undisturbed"), "whole", workers=2)


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped in the middle of the second epoch; copy it, do not touch it."""
    runs = tmp_path_factory.mktemp("halted")
    return begin(runs, "halted", workers=2, train={"stop_after_steps": 10})


@pytest.fixture
def run(halted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(halted, tmp_path / "halted"))


def check_same(run: Path, undisturbed: Path) -> None:
    """The same samples in the same order, the same losses, the same bits."""
    one, other = RunFolder(run), RunFolder(undisturbed)
    assert one.audit.exact
    assert one.audit.sha256 == other.audit.sha256
    assert one.outcome == "completed"
    firsts = [
        np.unique(folder.ledger[["step", "epoch"]], return_counts=False) for folder in (one, other)
    ]
    assert np.array_equal(*firsts)
    for step in range(1, 43):
        cuts = [folder.ledger[folder.ledger["step"] == step] for folder in (one, other)]
        ranges = [(int(c["first"].min()), int(c["stop"].max())) for c in cuts]
        assert ranges[0] == ranges[1]
        losses = {float(x) for f in (one, other) for x in f.steps["loss"][f.steps["step"] == step]}
        assert len(losses) == 1, step
    sums = [json.loads((f / "summary.json").read_text()) for f in (run, undisturbed)]
    assert sums[0]["parameters_sha256"] == sums[1]["parameters_sha256"]
    assert sums[0]["loss"] == sums[1]["loss"]
    assert sums[0]["metrics"] == sums[1]["metrics"]
    assert sums[0]["repeated_samples"] == sums[0]["missing_samples"] == 0


@pytest.mark.slow
def test_a_stopped_run_resumes_with_the_next_batch_at_another_size(
    run: Path, undisturbed: Path
) -> None:
    assert RunFolder(run).last_step == 10
    done = instep.resume(run, workers=3, quiet=True, data={"loaders": 1}, checkpoint={"every": 3})
    assert done.exit_code == 0
    check_same(run, undisturbed)
    folder = RunFolder(run)
    assert [len(each["members"]) for each in folder.members.generations] == [2, 3]
    assert [each["generation"] for each in folder.members.generations] == [1, 2]
    assert set(folder.ledger["generation"][folder.ledger["step"] > 10]) == {2}
    assert folder.spec.workers == 3
    means = [e["loss"] for e in folder.named("epoch_finished")]
    assert means == [e["loss"] for e in RunFolder(undisturbed).named("epoch_finished")]


@pytest.mark.slow
def test_a_run_that_is_stopped_at_20_random_steps_has_the_result_of_an_uninterrupted_one(
    tmp_path: Path, undisturbed: Path
) -> None:
    draw = random.Random(7)
    stops = sorted(draw.sample(range(1, 42), 20))
    run = begin(tmp_path, "often", workers=1, train={"stop_after_steps": stops[0]})
    for stop in [*stops[1:], 0]:
        size, loaders = draw.randint(1, 5), draw.choice([0, 1, "auto"])
        train = {"stop_after_steps": stop}
        instep.resume(run, workers=size, quiet=True, train=train, data={"loaders": loaders})
    check_same(run, undisturbed)


def test_a_run_whose_every_process_was_killed_resumes_from_its_checkpoint(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "killed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = 2\nseed = 5\n'
        '[train]\nepochs = 6\nglobal_batch = 16\ndeterminism = "bits"\n'
        "[checkpoint]\nevery = 5\n[arguments]\npause_s = 0.015\n"  # else it ends before the kill
    )
    program = start("-m", "instep", "run", job)
    program.until(lambda: program.is_training() and program.ledger["step"].max() >= 18, "far")
    program.kill()
    # a worker may have been replaced before its fork server was killed: it finds nobody to call
    program.check_no_process_is_left()
    assert RunFolder(program.run).outcome == "unfinished"
    before = RunFolder(program.run).ledger["step"].max()
    again = start("-m", "instep", "resume", program.run, "--workers", "3", "--json")
    assert again.end() == 0, again.stderr
    check_same(program.run, undisturbed)
    (resumed,) = [e for e in program.events("run_started") if "resumed_step" in e]
    assert resumed["resumed_step"] % 5 == 0
    assert 0 <= before - resumed["resumed_step"] <= 10  # one interval, and the save under way
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 42


@pytest.mark.tail
def test_the_model_of_the_session_before_is_not_taken_for_that_of_one_that_was_killed(
    start: Start, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (run / "model.safetensors").is_file()
    forever = ("--set", "train.epochs=1000000", "--set", "checkpoint.every=never")
    program = start("-m", "instep", "resume", run, *forever)
    program.until(lambda: RunFolder(run).last_step > 10, "beyond step 10")
    assert not (run / "model.safetensors").exists()
    program.kill()
    program.check_no_process_is_left()
    target = run.parent / "m.safetensors"
    assert main(["export", str(run), "--to", str(target)]) == 6
    assert "has no model: the run is unfinished" in capsys.readouterr().err
    assert main(["export", str(run), "--step", "10", "--to", str(target)]) == 0


@pytest.mark.tail
def test_a_run_that_cannot_resume_keeps_its_model(run: Path) -> None:
    with pytest.raises(SpecError, match="cannot become"):
        instep.resume(run, quiet=True, seed=8)
    with pytest.raises(SpecError, match="stop_after_steps"):
        instep.resume(run, quiet=True, train={"stop_after_steps": 10})
    assert (run / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["summary.json", "logs/worker-0.log", "run.id"])
@pytest.mark.parametrize("kind", ["directory", "named pipe"])
def test_what_is_no_file_is_found_before_anything_is_trained(
    run: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink()
    put(kind, run / name)
    before = (run / "ledger.bin").read_bytes()
    assert main(["resume", str(run)]) == 6
    assert f"{name} cannot be used: it is a {kind} and not a file" in capsys.readouterr().err
    assert (run / "ledger.bin").read_bytes() == before
    assert (run / "model.safetensors").is_file()


@pytest.mark.tail
def test_a_model_that_no_checkpoint_has_is_set_aside_and_not_lost(
    run: Path, undisturbed: Path
) -> None:
    newest = run / "checkpoints" / "step-00000010" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    before = (run / "model.safetensors").read_bytes()
    instep.resume(run, quiet=True)
    check_same(run, undisturbed)
    assert (run / "model-of-step-10.safetensors").read_bytes() == before
    (warning,) = [
        e["text"] for e in RunFolder(run).named("warning") if "model-of-step" in e["text"]
    ]
    assert "the model of step 10" in warning


@pytest.mark.tail
@pytest.mark.parametrize("kept", [slow(None), 0, slow(1)])
def test_without_the_log_the_step_of_a_model_is_not_named(
    run: Path, undisturbed: Path, kept: int | None
) -> None:
    log, model = run / "events.jsonl", (run / "model.safetensors").read_bytes()
    lines = log.read_text().splitlines(keepends=True)
    log.unlink()
    if kept is not None:
        log.write_text("".join(lines[:kept]))
    instep.resume(run, quiet=True)
    said = [e["text"] for e in RunFolder(run).named("warning")]
    assert not any("None" in text for text in said)
    assert any(text.endswith(f"is now {run / 'model-before.safetensors'}.") for text in said)
    assert (run / "model-before.safetensors").read_bytes() == model
    assert any("has lost the events" in text for text in said) == (not kept)
    check_same(run, undisturbed)


@pytest.mark.tail
def test_a_run_that_another_process_runs_is_left_alone(start: Start, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    recipe = RECIPES / "tiny.py"
    job.write_text(f'recipe = "{recipe}:recipe"\n[train]\nsteps = 10000000\nglobal_batch = 16\n')
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    with pytest.raises(RunError, match="is running in another process"):
        instep.resume(program.run, quiet=True)
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert RunFolder(program.run).audit.exact


@pytest.mark.tail
def test_a_finished_run_is_complete_and_can_be_trained_longer(
    undisturbed: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "whole"))
    with pytest.raises(SpecError, match=r"complete: it has 42 of 42 steps.*train.epochs=12"):
        instep.resume(run, quiet=True)
    longer = instep.resume(run, quiet=True, train={"epochs": 7}, workers=1)
    assert longer.summary["steps"] == 49
    at_once = begin(tmp_path, "at-once", train={"epochs": 7})
    shas = [
        json.loads((f / "summary.json").read_text())["parameters_sha256"] for f in (run, at_once)
    ]
    assert shas[0] == shas[1]


@pytest.mark.tail
def test_a_run_that_was_killed_before_it_saved_its_model_saves_it(
    undisturbed: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "whole"))
    (run / "model.safetensors").unlink()
    log = run / "events.jsonl"
    until = log.read_text().index('"event": "model_saved"')
    log.write_text(log.read_text()[:until])  # with half a line, as a kill may leave it
    with (run / "steps.bin").open("ab") as steps:
        steps.write(b"torn")
    done = instep.resume(run, workers=1, quiet=True)
    assert done.summary["steps"] == 42
    check_same(run, undisturbed)
    assert (run / "model.safetensors").is_file()
    with pytest.raises(SpecError, match="is complete"):
        instep.resume(run, quiet=True)


@pytest.mark.tail
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    run: Path, undisturbed: Path
) -> None:
    newest = run / "checkpoints" / "step-00000010" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    instep.resume(run, quiet=True)
    check_same(run, undisturbed)
    folder = RunFolder(run)
    warning, _ = folder.named("warning")  # the other is of the model, see above
    assert "step-00000010/model.safetensors" in warning["text"]
    assert "An earlier checkpoint is used." in warning["text"]
    assert folder.last("run_started")["resumed_step"] == 5


@pytest.mark.tail
def test_a_run_without_a_checkpoint_begins_again_in_its_folder(
    run: Path, undisturbed: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    instep.resume(run, quiet=True)
    check_same(run, undisturbed)


def test_a_run_of_which_every_checkpoint_is_damaged_is_not_begun_again(run: Path) -> None:
    for manifest in (run / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    ledger = (run / "ledger.bin").read_bytes()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is valid"):
        instep.resume(run, quiet=True)
    assert (run / "ledger.bin").read_bytes() == ledger


def test_a_ledger_that_was_cut_is_not_taken_for_the_truth(run: Path) -> None:
    (run / "ledger.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is no longer known"):
        instep.resume(run, quiet=True)


@pytest.mark.tail
def test_a_recipe_that_builds_another_model_now_is_refused(run: Path) -> None:
    text = (RECIPES / "tiny.py").read_text().replace("16", "17")
    (run.parent / "other.py").write_text(text)
    with pytest.raises(instep.InstepError, match="builds another model") as refused:
        instep.resume(run, quiet=True, recipe=f"{run.parent / 'other.py'}:recipe")
    assert refused.value.exit_code == CheckpointError.exit_code


def test_the_command_says_how_to_go_on_after_a_stop(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    assert f"instep resume {run}" in capsys.readouterr().out
    assert main(["resume", str(run), "--set", "seed=6"]) == 2
    told = capsys.readouterr().err
    assert "seed was 5 and cannot become 6" in told
    assert main(["resume", str(run.parent / "haltet")]) == 6
    assert "Did you mean 'halted'" in capsys.readouterr().err


@pytest.mark.slow
def test_in_order_mode_too_the_losses_are_those_of_one_run(tmp_path: Path) -> None:
    order = {"determinism": "order"}
    whole = begin(tmp_path, "whole", workers=3, train=order)
    run = begin(tmp_path, "halves", workers=2, train={**order, "stop_after_steps": 17})
    instep.resume(run, workers=4, quiet=True)
    losses = [f.steps for f in map(RunFolder, (run, whole))]
    for step in range(1, 43):
        one, other = (s["loss"][s["step"] == step][0] for s in losses)
        assert one == pytest.approx(other, rel=1e-5)
    assert RunFolder(run).audit.exact
    assert distance(run, whole) < 1e-6


@pytest.mark.tail
def test_nothing_is_ever_unpickled(start: Start, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "plain"\nrecipe = "{RECIPES / "no_pickle.py"}:recipe"\n'
        "[train]\nepochs = 2\nglobal_batch = 16\nstop_after_steps = 9\n"
        "[checkpoint]\nevery = 4\n[data]\nloaders = 1\n"
    )
    first = start("-m", "instep", "run", job)
    assert first.end() == 0, first.stderr
    second = start("-m", "instep", "resume", first.run, "--workers", "1")
    assert second.end() == 0, second.stderr
    assert RunFolder(first.run).last_step == 14


@pytest.mark.slow
def test_an_own_loop_resumes_within_its_epoch(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    whole, halves = runs / "whole", runs / "halves"
    for name, stop in (("whole", 0), ("halves", 5), ("halves", 0)):
        program = start(RECIPES / "own_loop_resumes.py", runs, name, stop)
        assert program.end() == 0, program.stderr
    assert RunFolder(halves).audit.exact
    one, other = (load_file(run / "model.safetensors") for run in (whole, halves))
    assert all(np.array_equal(one[name], other[name]) for name in one)
