"""`instep check`: one process that leaves nothing, with the answers of the run itself."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from started import RECIPES, Start

from instep.cli import main
from marks import tail

pytestmark = pytest.mark.process

QUICK = ("train.epochs=1", "train.global_batch=16", "train.threads=1")
SAMPLER = "no: Recipe.train's DataLoader has a sampler"
ROUNDS = ("sync.name=averaging", "sync.options.local_steps=2")
SELDOM = "not shown: Seldom.number is not in state_dict()"


def job_file(folder: Path, text: str) -> Path:
    job = folder / "job.toml"
    job.write_text(text)
    return job


def test_a_good_job_is_checked_in_one_process_that_leaves_nothing(start: Start, tmp_path: Path):
    job = job_file(tmp_path, f'recipe = "{RECIPES / "tiny.py"}:recipe"\nworkers = 3\n')
    before = sorted(RECIPES.iterdir())
    program = start("-m", "instep", "check", job, "--json")
    assert program.end() == 0, program.stderr
    found = json.loads(program.stdout)
    assert found["starts"]
    assert (found["data"]["train"], found["job"]["workers"]) == (101, 3)
    assert found["model"]["parameters"] == 6 * 16 + 16 + 16 * 3 + 3
    assert program.stderr.splitlines()[-1] == f"next       instep run {job}"
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    assert list(program.work.iterdir()) == []
    assert sorted(RECIPES.iterdir()) == before
    assert program.listened == set()


def test_no_process_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    job = job_file(tmp_path, f'recipe = "{RECIPES / "tiny.py"}:recipe"\n[data]\nloaders = 2\n')
    assert main(["check", str(job), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["starts"]


def test_three_mistakes_are_told_in_one_go_with_the_code_of_a_run(start: Start, tmp_path: Path):
    text = (
        f'recipe = "{RECIPES / "tiny.py"}:recipe"\nworkers = 3\n[train]\nepoch = 3\n'
        "[stop]\nmetric = 'acuracy'\npatience = 2\n[sync]\nservers = 2\n"
    )
    job = job_file(tmp_path, text)
    checked, ran = (start("-m", "instep", command, job) for command in ("check", "run"))
    assert checked.end() == ran.end() == 2
    first, *others = (line for line in checked.stdout.splitlines() if line[:7] == "refused")
    assert len(others) == 2
    assert "[train] has no key 'epoch'. Did you mean 'epochs'?" in first
    assert "sync.servers = 2: all_reduce has no servers" in others[0]
    assert (
        "stop.metric = 'acuracy': no validation gives that. Did you mean 'accuracy'?" in others[1]
    )
    assert "starts     no: 3 refusals, exit code 2" in checked.stdout
    assert "model      Sequential: 163 parameters" in checked.stdout  # the rest is checked
    assert "next" not in checked.stdout
    checked.check_no_file_is_left()
    assert "'epoch'" in ran.stderr  # of the three, a run tells the first
    assert "servers" not in ran.stderr


@pytest.mark.parametrize(
    ("recipe", "settings", "answer"),
    [
        ("weighs.py:recipe", ('arguments.layer="batch norm"',), "no: BatchNorm1d '1' looks at"),
        tail("tiny.py:recipe", (), "yes"),
        tail("weighs.py:sampled", (), SAMPLER),
        tail("keeps.py:recipe", ("arguments.seldom=true",), SELDOM),
        tail("tiny.py:recipe", ("sync.codec=int8",), "no: sync.codec = 'int8' rounds"),
        tail("tiny.py:recipe", ROUNDS, "no: sync.name = 'averaging' averages"),
    ],
)
def test_the_verdict_is_that_of_the_run(
    run: Start, start: Start, tmp_path: Path, recipe: str, settings: tuple[str, ...], answer: str
):
    trained = run(recipe, *QUICK, *settings, options=("--json",))
    assert trained.end() == 0, trained.stderr
    sets = [part for setting in (*QUICK, *settings) for part in ("--set", setting)]
    checked = start("-m", "instep", "check", tmp_path / "job.toml", *sets, "--json")
    assert checked.end() == 0, checked.stderr
    found = json.loads(checked.stdout)["same_as_one_machine"]
    (event,) = trained.events("same_as_one_machine")
    assert found["verdict"] == event["verdict"]
    assert found["verdict"].startswith(answer)
    chosen = trained.events("passes_chosen")[0]
    assert (found["merged"], found["reason"]) == (chosen["merged"], chosen["reason"])


@pytest.mark.parametrize(
    ("recipe", "settings", "code"),
    [
        ("tiny.py:recipe", ("arguments.lr=-1.0",), 3),
        tail("tiny.py:recipe", ("arguments.rate=1",), 3),
        tail("tiny.py:recipe", ("check.strict=true", "sync.codec=int8"), 2),
        tail("weighs.py:recipe", ("arguments.layer=nothing",), 5),
    ],
)
def test_what_is_refused_has_the_code_and_the_words_of_the_run(
    run: Start, start: Start, tmp_path: Path, recipe: str, settings: tuple[str, ...], code: int
):
    trained = run(recipe, *QUICK, *settings)
    assert trained.end() == code, trained.stderr
    sets = [part for setting in (*QUICK, *settings) for part in ("--set", setting)]
    checked = start("-m", "instep", "check", tmp_path / "job.toml", *sets, "--json")
    assert checked.end() == code, checked.stderr
    first, *_ = json.loads(checked.stdout)["refusals"]
    assert first["text"] in trained.stderr.replace("\n", " ")
