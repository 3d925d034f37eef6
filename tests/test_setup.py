"""`make` installs what a command needs, and keeps the torch that pip found."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def steps(target: str, *, path: str = os.defpath) -> list[str]:
    """What make would run in a checkout without an environment."""
    words = ["make", "--dry-run", "--always-make", "--no-print-directory", target]
    environment = {"PATH": path, "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line for line in lines if " install " in line]


def test_the_demo_installs_torch_and_what_the_example_needs_and_no_more():
    torch, rest = installs(steps("demo"))
    assert '"torch>=' in torch
    assert '".[examples]"' in rest


@pytest.mark.parametrize("target", ["test", "check", "site"])
def test_tests_and_checks_add_to_the_environment_of_the_demo(target):
    demo, lines = installs(steps("demo")), installs(steps(target))
    assert lines[:2] == demo
    assert '".[dev]"' in lines[2]
    assert len(lines) == 3


def test_uv_where_it_is_there_installs_all_but_torch_and_must_keep_that(tmp_path):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    torch, *rest = installs(steps("test", path=f"{tmp_path}:{os.defpath}"))
    assert "-m pip install" in torch
    assert len(rest) == 2
    for line in rest:
        assert line.startswith(f"{uv} pip install --python .venv/bin/python")
        assert "--constraint .venv/torch.txt" in line
