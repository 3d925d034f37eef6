"""What `instep init` writes trains as it is, on two workers, and learns."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

LEARNT = {
    "vision": lambda metrics: metrics["accuracy"] > 0.9,
    "language": lambda metrics: metrics["loss"] < 2.9,  # of 4.9, where all are as likely
    "table": lambda metrics: metrics["error"] < 80,  # of rents of some 1,200
    "hugging-face": lambda metrics: metrics["loss"] < 0.5,  # of 0.69
    "own-loop": lambda metrics: metrics["accuracy"] > 0.95,
}


def instep(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "instep", *words], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", LEARNT)
def test_it_trains_with_the_command_that_init_names_and_learns(tmp_path, kind):
    words = json.loads(instep("init", kind, "--json", cwd=tmp_path))["next"][1:]
    summary = json.loads(instep(*words, "--json", cwd=tmp_path))
    assert summary["outcome"] == "completed"
    assert summary["workers"] == 2
    assert LEARNT[kind](summary["metrics"]), summary["metrics"]
    if kind == "language":
        program = [sys.executable, "language/write.py", "runs/language", "The"]
        written = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert written.stdout.startswith("The")
        assert len(written.stdout) > 150
