"""A search on a pool gives way, is killed and goes on, and has the trials of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from started import RECIPES, TIMEOUT_S

from instep.detached import pid_of
from instep.pool.pool_file import PoolFolder
from instep.search.begin import found_in
from instep.store.run_folder import RunFolder
from lazily import needs

pytestmark = [pytest.mark.process, pytest.mark.tail, needs("optuna")]

JOB = f"""
name = "net"
recipe = "{RECIPES / "slow_tiny.py"}:recipe"
seed = 5
[train]
epochs = 6
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

URGENT = f"""
name = "urgent"
recipe = "{RECIPES / "slow_tiny.py"}:recipe"
[train]
epochs = 1
global_batch = 32
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolFolder]:
    found = PoolFolder(tmp_path / "pool")
    yield found
    locks = [found.lock, *found.jobs.glob("*.lock"), *tmp_path.glob("runs/*/jobs/*.lock")]
    for lock in locks:
        if (pid := pid_of(lock)) is not None:
            os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def call(name: str, *words: object) -> Any:
    command = [sys.executable, "-m", "instep", name, "--json", *map(str, words)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def steps_of(run: Path) -> int:
    return RunFolder(run).last_step if (run / "events.jsonl").exists() else 0


def test_a_search_on_a_pool_shrinks_is_killed_and_has_the_same_trials(
    tmp_path: Path, pool: PoolFolder
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "urgent.toml").write_text(URGENT)
    (tmp_path / "pool.toml").write_text("cores = 2\n")
    where = ["--pool", pool.folder]
    call("pool", *where, "start", tmp_path / "pool.toml")
    assert call("submit", tmp_path / "job.toml", *where)["job"] == "net"
    folder = tmp_path / "runs" / "net"
    until(lambda: min(steps_of(folder / f"trial-00{n}") for n in (0, 1)) > 0)
    call("submit", tmp_path / "urgent.toml", "--priority", 5, "--at-most", 1, *where)
    until(lambda: bool(pool.state().jobs["urgent"].outcome))
    assert not pool.state().jobs["net"].outcome
    parked, urgent = RunFolder(folder / "trial-001"), RunFolder(tmp_path / "runs" / "urgent")
    had_ended = parked.times.sessions[0][1] <= urgent.times.sessions[0][0]
    gave = parked.outcome == "interrupted" or len(parked.times.sessions) > 1
    assert gave or had_ended  # two cores never had three workers
    until(lambda: pid_of(pool.jobs / "net.lock") is not None)
    client = pid_of(pool.jobs / "net.lock")
    assert client is not None
    os.kill(client, signal.SIGKILL)  # its trials stop at a commit, and are continued
    until(lambda: bool(pool.state().jobs["net"].outcome))
    assert {job.outcome for job in pool.state().jobs.values()} == {"completed"}
    call("pool", *where, "stop")
    call("search", tmp_path / "job.toml", "--runs", tmp_path / "alone", "--name", "net")
    disturbed, alone = found_in(folder).told, found_in(tmp_path / "alone" / "net").told
    assert [dict(each.values) for each in disturbed.values()] == [
        dict(each.values) for each in alone.values()
    ]
    for ours, theirs in zip(disturbed.values(), alone.values(), strict=True):
        assert ours.result.parameters_sha256 == theirs.result.parameters_sha256
    runs = [RunFolder(folder / f"trial-00{number}") for number in range(3)]
    assert all(run.audit.exact for run in runs)
