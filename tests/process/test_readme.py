"""The programs of the README run as they are printed there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")

pytestmark = pytest.mark.process


def block(holds: str, language: str) -> str:
    """The text of the one block that holds something."""
    every = re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)
    (found,) = (each for each in every if holds in each)
    return found


def run(*words: object, folder: Path, name: str) -> dict:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = done.stderr + done.stdout
    assert f"report  {folder}/runs/{name}/report.html\n" in told  # what to do next
    summary: dict = json.loads((folder / "runs" / name / "summary.json").read_text())
    return summary


def test_the_lines_of_its_first_screen_train_on_two_processes(tmp_path):
    text = README[: README.index("Why use it")]
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len([line for line in program.splitlines() if line]) == 15
    (tmp_path / "train.py").write_text(program)
    summary = run("train.py", folder=tmp_path, name="recipe")
    assert (summary["outcome"], summary["workers"]) == ("completed", 2)
    assert summary["loss"] < 0.5  # of 0.69, where both classes are as likely


@pytest.mark.slow
def test_its_recipe_trains_from_a_job_file_from_python_and_joined(tmp_path):
    (tmp_path / "net.py").write_text(block("def recipe(lr", "python"))
    (tmp_path / "job.toml").write_text(block('recipe = "net.py:recipe"', "toml"))
    (tmp_path / "program.py").write_text(block("run = instep.train", "python"))
    (tmp_path / "joined.py").write_text(block("instep.join(recipe", "python"))
    assert run("-m", "instep", "run", "job.toml", folder=tmp_path, name="net")["workers"] == 2
    assert run("program.py", folder=tmp_path, name="recipe")["epochs"] == 2
    assert run("joined.py", folder=tmp_path, name="joined")["workers"] == 1


@pytest.mark.slow
def test_its_loop_trains_under_torchrun_and_under_instep_run(tmp_path):
    (tmp_path / "loop.py").write_text(block("session.prepare", "python"))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "loop.py")
    first = run(*torchrun, folder=tmp_path, name="loop")
    second = run("-m", "instep", "run", "loop.py", "--workers", 2, folder=tmp_path, name="loop-2")
    assert first["workers"] == second["workers"] == 2
    assert first["parameters_sha256"] == second["parameters_sha256"]
