"""A run that starts from a file: what is frozen keeps its bits, at any number of workers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tunes
from safetensors.numpy import load_file
from safetensors.torch import save_file
from started import RECIPES, Start, distance

import instep
from instep.errors import SpecError
from instep.report.figures.proof import prove
from instep.report.terminal.closing import closing_lines
from instep.state.load import load
from instep.state.packing import unpack_state
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A trained model, as it were: with another head, and statistics that are not the first."""
    torch.manual_seed(71)
    model = tunes.Net(5)
    model(torch.randn(32, 6))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.slow
def test_what_is_frozen_has_the_bits_of_the_file_after_training_on_1_and_3_workers(
    file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    start = {
        "model": file.name,  # from Python, relative to the working folder
        "partial": True,
        "freeze": ["body.*"],
        "learning_rates": {"neck.*": 0.001},
    }
    runs = [
        instep.train(
            tunes.recipe,
            workers=workers,
            runs=tmp_path / "runs",
            seed=5,
            start=start,
            train={"epochs": 2, "global_batch": 16, "threads": 1},
            quiet=workers == 1,
        )
        for workers in (1, 3)
    ]
    given = load_file(file)
    for run in runs:
        trained = load_file(run.path / "model.safetensors")
        same = {name for name in given if np.array_equal(given[name], trained[name])}
        assert same == {name for name in given if name.startswith("body.")}
        assert len(same) == 7
    assert distance(runs[0].path, runs[1].path) < 1e-6

    (loaded,) = RunFolder(runs[1].path).named("model_loaded")  # one worker tells it for all
    said = "9 of 11 tensors match; wrong: head.weight ([5, 16] in the file, [3, 16] in the model)"
    assert loaded["text"].startswith(said)
    assert (loaded["path"], loaded["matched"]) == (str(file), 9)
    assert f"started from {file}: {said}" in capfd.readouterr().err
    lines = closing_lines(runs[1].summary, RunFolder(runs[1].path))
    assert [line for line in lines if line.startswith(f"start   {file}: {said}")]
    assert f"{file}: 9 of 11 tensors match" in (runs[1].path / "report.html").read_text()

    (checkpoint,) = (runs[1].path / "checkpoints").iterdir()
    saved = load(checkpoint)
    optimizer = unpack_state(saved.tensors["optimizer"], saved.facts["optimizer"])
    groups = optimizer["param_groups"]
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 0.01), (2, 0.001)]


@pytest.mark.slow
def test_a_run_that_is_resumed_needs_the_file_no_longer_and_keeps_what_is_frozen(
    file: Path, tmp_path: Path
) -> None:
    start = {
        "model": str(file),
        "partial": True,
        "freeze": ["body.*"],
        "learning_rates": {"neck.*": 0.001},
    }
    job: dict[str, Any] = {"runs": tmp_path / "runs", "quiet": True, "start": start}
    train = {"epochs": 2, "global_batch": 16, "threads": 1, "determinism": "bits"}
    stopped = {**train, "stop_after_steps": 5}
    whole = instep.train(tunes.recipe, name="whole", workers=1, train=train, **job)
    path = instep.train(tunes.recipe, name="stopped", workers=2, train=stopped, **job).path
    given = load_file(file)
    file.unlink()
    done = instep.resume(path, workers=1, quiet=True)
    assert done.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    trained = load_file(path / "model.safetensors")
    same = {name for name in given if np.array_equal(given[name], trained[name])}
    assert same == {name for name in given if name.startswith("body.")}
    assert len(RunFolder(path).named("model_loaded")) == 1
    assert prove(RunFolder(path)).exact
    with pytest.raises(SpecError, match=r"start\.freeze was \['body\.\*'\] and cannot become \[\]"):
        instep.resume(path, quiet=True, start={"freeze": []}, train={"epochs": 3})


@pytest.mark.tail
def test_a_file_that_does_not_fit_ends_the_run_with_the_names(file: Path, run: Start) -> None:
    program = run("tunes.py:recipe", f"start.model={file}")
    assert program.end() == 7
    first = program.error.splitlines()[0]
    assert f"{file} does not fit the model: 9 of 11 tensors match; wrong: head.weight" in first
    assert "start.partial = true" in first
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    assert list(program.work.iterdir()) == []  # it was refused before it trained


@pytest.mark.slow
def test_an_own_loop_is_refused_start_and_freeze(start: Start) -> None:
    program = start(RECIPES / "joins_with_start.py")
    assert program.end() != 0
    assert "[start] is set, but your own loop makes model and optimizer" in program.stderr
    assert "instep.load_model(path, model)" in program.stderr
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    assert list((program.work / "runs").iterdir()) == []  # it was refused before it trained
