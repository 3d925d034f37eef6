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

STEPS = {"vision": 375, "language": 100, "table": 260, "hugging-face": 32, "own-loop": 100}
"""Few enough for ten seconds, as `docs/guides/first-run.md` says of each."""


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
    assert summary["steps"] == STEPS[kind]
    if kind == "language":
        program = [sys.executable, "language/write.py", "runs/language", "The"]
        written = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert written.stdout.startswith("The")
        assert len(written.stdout) > 150


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        (
            "table",
            "target=price",
            "table.csv has area, rooms, floor, built, district, lift, rent; ",
        ),
        ("hugging-face", "text=comment", "reviews.csv has text, label; job.toml names 'comment'"),
    ],
)
def test_a_column_that_is_not_there_is_named(tmp_path, kind, column, said):
    words = json.loads(instep("init", kind, "--json", cwd=tmp_path))["next"][1:]
    command = [sys.executable, "-m", "instep", *words, "--set", f"arguments.{column}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 5
    assert said in done.stderr
