"""A flow on a pool whose scheduler is killed: each part once, in order; and again what failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started import RECIPES, TIMEOUT_S

from instep.detached import pid_of
from instep.pool.pool_file import PoolFolder

pytestmark = [pytest.mark.process, pytest.mark.tail]

JOB = f"""
recipe = "{RECIPES / "slow_tiny.py"}:recipe"
[train]
epochs = 2
global_batch = 32
"""

FLOW = """
[job.prepare]
command = ["sh", "-c", "echo prepared >> said; sleep 1"]
[job.train]
file = "job.toml"
after = ["prepare"]
[job.deploy]
command = ["sh", "-c", "test -f {train}/model.safetensors && cat key >> said"]
after = ["train"]
when = "train.metrics.accuracy >= 0.0 and train.steps > 1"
[job.blame]
command = ["sh", "-c", "echo blamed >> said"]
after = ["deploy"]
when = "failed"
[job.praise]
command = ["sh", "-c", "echo praised >> said"]
after = ["deploy"]
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolFolder]:
    found = PoolFolder(tmp_path / "pool")
    yield found
    for lock in [found.lock, *found.jobs.glob("*.lock")]:
        if (pid := pid_of(lock)) is not None:
            os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def call(*words: object) -> str:
    command = [sys.executable, "-m", "instep", *map(str, words)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def test_a_flow_runs_each_part_once_whatever_becomes_of_its_scheduler(
    tmp_path: Path, pool: PoolFolder
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "nightly.toml").write_text(FLOW)
    (tmp_path / "pool.toml").write_text("cores = 2\n")
    said = tmp_path / "said"
    where = ["--pool", pool.folder]

    def states() -> dict[str, str]:
        return {job.id[8:]: job.outcome for job in pool.state().jobs.values()}

    call("pool", *where, "start", tmp_path / "pool.toml")
    assert "nightly-prepare" in call("submit", tmp_path / "nightly.toml", *where)
    until(said.exists)
    killed = pid_of(pool.lock)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)  # the command goes on, and the next one finds it
    call("pool", *where, "start")
    until(lambda: bool(states()["blame"]))
    assert said.read_text().splitlines() == ["prepared", "blamed"]  # there was no key
    until(lambda: all(states().values()))
    assert states() == {
        "prepare": "completed",
        "train": "completed",
        "deploy": "failed",
        "blame": "completed",
        "praise": "skipped",
    }
    assert "deploy is failed" in call("explain", "nightly-praise", *where)
    (tmp_path / "key").write_text("deployed\n")
    call("submit", tmp_path / "nightly.toml", "--again", *where)
    until(lambda: states()["praise"] == "completed")
    assert said.read_text().splitlines() == ["prepared", "blamed", "deployed", "praised"]
    call("pool", *where, "stop")
