"""Which checkpoints a real run leaves, and the best of them as a file of its own."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from started import Start

from instep.cli import main

pytestmark = pytest.mark.process

TINY = ("seed=5", "train.epochs=3", "train.global_batch=16", "train.threads=1")


@pytest.mark.tail
def test_the_best_of_a_run_stay_and_can_be_exported(
    run: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ("keep_last=1", "keep_best=2", "best_metric=accuracy", "every=7", "keep_every=14")
    settings = (*TINY, "train.validate_every=2", *(f"checkpoint.{key}" for key in keep))
    program = run("tiny.py:recipe", *settings, options=("--workers", "1"))
    assert program.end() == 0, program.stderr
    figures = {e["step"]: e["metrics"]["accuracy"] for e in program.events("validated")}
    best = sorted(figures, key=lambda step: (-figures[step], step))[:2]
    folder = program.run / "checkpoints"
    kept = {int(path.name.removeprefix("step-")) for path in folder.iterdir()}
    assert kept == {*best, 14, 21}
    target = tmp_path / "best.safetensors"
    assert main(["export", str(program.run), "--best", "--to", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["from"] == str(folder / f"step-{best[0]:08d}")
    assert target.read_bytes() == (folder / f"step-{best[0]:08d}/model.safetensors").read_bytes()
    assert load_file(target).keys() == load_file(program.run / "model.safetensors").keys()
    assert main(["export", str(program.run), "--step", "14", "--to", str(target)]) == 0
    assert "step-00000014" in capsys.readouterr().out
    assert main(["export", str(program.run), "--step", "13", "--to", str(target)]) == 7
    assert "there is no checkpoint of step 13" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_is_known_again_after_a_restart(run: Start, start: Start) -> None:
    keep = ("keep_last=1", "keep_best=1", "best_mode=max")  # so that the first one is the best
    settings = (*TINY, "train.validate_every=2", *(f"checkpoint.{key}" for key in keep))
    begun = run("tiny.py:recipe", *settings, "train.stop_after_steps=9")
    assert begun.end() == 0, begun.stderr
    folder = begun.run / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000009"]
    resumed = start("-m", "instep", "resume", begun.run, "--set", "train.stop_after_steps=0")
    assert resumed.end() == 0, resumed.stderr
    losses = {e["step"]: e["metrics"]["loss"] for e in begun.events("validated")}
    assert max(losses, key=lambda step: losses[step]) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000021"]


@pytest.mark.slow
def test_a_metric_that_the_recipe_does_not_have_is_refused_before_training(run: Start) -> None:
    program = run("tiny.py:recipe", *TINY, "checkpoint.keep_best=1", "checkpoint.best_metric=acc")
    assert program.end() == 2
    assert "checkpoint.best_metric = 'acc': the validation does not measure it" in program.error
