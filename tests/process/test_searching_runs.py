"""A search that is killed goes on with the same trials, and each is the run that it says it is."""

import json
import os
from pathlib import Path

import pytest
from started import RECIPES, Start

from instep.detached import pid_of
from instep.search.record import SearchRecord
from instep.store.run_folder import RunFolder
from lazily import needs

pytestmark = [pytest.mark.process, pytest.mark.tail, needs("optuna")]

JOB = f"""
name = "net"
recipe = "{RECIPES / "slow_tiny.py"}:recipe"
seed = 5
[train]
epochs = 4
global_batch = 32
[search]
trials = 3
width = 2
metric = "accuracy"
sampler = "random"
[search.space]
"arguments.pause_s" = [0.004, 0.005]
"train.max_grad_norm" = {{ low = 0.1, high = 10.0, log = true }}
"""


def test_a_killed_search_finds_its_runs_and_each_trial_is_a_plain_run(
    start: Start, tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    words = ["-m", "instep", "search", job, "--runs", tmp_path, "--workers", 2]
    folder = tmp_path / "net-search"
    killed = start(*words)
    lock = folder / "jobs" / "trial-000.lock"
    killed.until(lambda: pid_of(lock) is not None, "the first trial has begun")
    client = pid_of(lock)
    killed.process.kill()
    killed.process.wait()
    assert client is not None
    os.kill(client, 0)  # it goes on
    continued = start(*words, "--json")
    assert continued.end() == 0, continued.stderr
    table = json.loads(continued.stdout.splitlines()[-1])
    assert [each["state"] for each in table["trials"]] == ["completed"] * 3
    runs = [RunFolder(folder / f"trial-{number:03d}") for number in range(3)]
    assert all(run.audit.exact and len(run.times.sessions) == 1 for run in runs)
    again = start("-m", "instep", "run", folder / "jobs" / "trial-002.toml", "--json")
    assert again.end() == 0, again.stderr
    assert again.summary["parameters_sha256"] == table["trials"][2]["parameters_sha256"]
    with SearchRecord(folder, write=False) as record:
        assert [dict(values) for values, _ in record.chosen()] == [
            each["values"] for each in table["trials"]
        ]
