"""A warm start gives the run that a cold one gives, and what is killed takes nothing else along."""

import json
import os
import signal
import time

import psutil
import pytest
from started import RECIPES, TIMEOUT_S, Start

from instep import detached
from instep.detached.warm import WarmStarts
from instep.events import read_events
from instep.store.run_folder import RunFolder
from instep.system.processes import has_ended

pytestmark = [pytest.mark.process, pytest.mark.cold]

NAMES = ["instep-host", "instep-master"]

JOB = f"""
name = "net"
recipe = "{RECIPES / "slow_tiny.py"}:recipe"
seed = 5
[train]
epochs = 2
global_batch = 32
threads = 1
determinism = "bits"
"""


@pytest.fixture
def warm():
    starts = WarmStarts()
    yield starts
    starts.close()


def until(holds):
    end = time.monotonic() + TIMEOUT_S
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def events(run, name):
    path = run / "events.jsonl"
    return [e for e in read_events(path) if e["event"] == name] if path.exists() else []


def test_a_warm_command_has_its_lock_at_once_and_leaves_its_exit_code(tmp_path, warm):
    lock, log = tmp_path / "lock", tmp_path / "log"
    warm.start(["logs", str(tmp_path / "none")], lock, log)
    assert detached.lives(lock)  # though what it is a fork of is still importing
    assert warm.start(["list"], lock, log) is None
    until(lambda: not detached.lives(lock))
    assert detached.exit_code(lock) == 6
    assert "there is no run at" in log.read_text()


def test_a_warm_run_equals_a_cold_one_whatever_of_it_is_killed(tmp_path, warm, start: Start):
    job, lock, log = tmp_path / "job.toml", tmp_path / "lock", tmp_path / "log"
    job.write_text(JOB)
    run = tmp_path / "runs" / "net"
    words = ["run", str(job), "--runs", str(tmp_path / "runs"), "--workers", "1", "--json"]
    warm.start(words, lock, log)
    until(lambda: events(run, "worker_ready"))
    warm.close()  # killed: what it has started goes on
    forked = [p for p in psutil.Process(detached.pid_of(lock)).children() if p.name() in NAMES]
    assert sorted(p.name() for p in forked) == NAMES
    for process in forked:  # others take their places, and are fresh interpreters
        process.kill()
    until(lambda: not detached.lives(lock))
    assert detached.exit_code(lock) == 0, log.read_text()
    cold = start("-m", "instep", "run", job, "--workers", 1, "--json")
    assert cold.end() == 0, cold.stderr
    assert RunFolder(run).audit.exact
    warm_sha = json.loads((run / "summary.json").read_text())["parameters_sha256"]
    assert warm_sha == cold.summary["parameters_sha256"]


def test_what_a_warm_client_has_forked_ends_with_it(tmp_path, warm):
    job, lock, log = tmp_path / "job.toml", tmp_path / "lock", tmp_path / "log"
    job.write_text(JOB)
    run = tmp_path / "runs" / "net"
    words = ["run", str(job), "--runs", str(tmp_path / "runs"), "--workers", "1", "--json"]
    warm.start(words, lock, log)
    (worker, *_) = until(lambda: events(run, "worker_joined"))
    os.kill(detached.pid_of(lock), signal.SIGKILL)
    until(lambda: has_ended(worker["pid"]))
    until(lambda: not detached.lives(lock))
    assert detached.exit_code(lock) is None
