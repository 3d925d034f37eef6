"""Private runs of real processes: the same bits on any number of workers and after kills, and a
folder that holds nothing of a sample."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from started import RECIPES

from instep.client.submit import Run, resume_run, run_job
from instep.errors import SpecError
from instep.events import LEDGER, STEPS, read_records
from instep.job import file as spec_file
from instep.privacy import secret_files
from lazily import needs

pytestmark = [pytest.mark.process, needs("dp_accounting")]

PLANTED = struct.pack("<f", 1234.56789)
STEPS_OF_A_RUN, MANY_STEPS = 12, 2000


@pytest.fixture(autouse=True)
def one_secret(tmp_path, monkeypatch):
    """Runs that are compared have the same secret, and leave it here."""
    monkeypatch.setenv(secret_files.ENVIRONMENT, str(tmp_path / "secrets"))
    monkeypatch.setattr(secret_files, "new_secret", lambda: bytes(range(32)))


def trained(
    folder: Path, workers: int, watch=None, stop_after: int = 0, steps=STEPS_OF_A_RUN, **privacy
) -> Run:
    table = {
        "name": f"of-{workers}",
        "recipe": f"{RECIPES / 'private.py'}:recipe",
        "workers": workers,
        "train": {
            "steps": steps,
            "stop_after_steps": stop_after,
            "global_batch": 32,
            "micro_batches": 8,
            "determinism": "bits",
            "threads": 1,
        },
        "privacy": {"protects": "sample", "noise": 2.0, "delta": 1e-4, **privacy},
        "checkpoint": {"every": 5},
    }
    job = spec_file.build(table, source="a test")
    return run_job(job, folder / "runs", named=False, quiet=True, watch=watch)


def killing_one(at: int):
    """Kill the newest process of worker 1 once the run has come to a step."""
    done: list[int] = []

    def watch(folder: Path) -> None:
        if not done and step_of(folder) >= at:
            done.append(newest_pids(folder)[1])
            os.kill(done[0], signal.SIGKILL)

    return watch


def killing_many(kills: int, killed: set[int]):
    """Kill one process of a worker after the other, each once the run has gone on."""
    draw, reached = random.Random(kills), [0]

    def watch(folder: Path) -> None:
        step = step_of(folder)
        if len(killed) >= kills or step <= reached[0]:
            return
        pid = draw.choice(list(newest_pids(folder).values()))
        if pid not in killed:  # its successor may not be there yet
            reached[0] = step
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return watch


def step_of(folder: Path) -> int:
    steps = folder / "steps.bin"
    return int(read_records(steps, STEPS)["step"].max(initial=0)) if steps.is_file() else 0


def newest_pids(folder: Path) -> dict[int, int]:
    """Of each worker the process that came last."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {e["worker"]: e["pid"] for e in events if e["event"] == "worker_joined"}


@pytest.mark.tail
def test_one_worker_and_two_of_which_one_is_killed_give_the_same_bits(tmp_path):
    alone = trained(tmp_path, 1)
    two = trained(tmp_path, 2, killing_one(2))
    assert two.summary["generations"] > 1
    assert two.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    found = two.summary["privacy"]
    assert found["released"] == STEPS_OF_A_RUN
    assert found["released_again"] == 0
    assert 0 < found["epsilon_lower"] <= found["epsilon"]
    assert two.summary["repeated_samples"] == two.summary["missing_samples"] == 0
    assert two.summary["loss"] is None
    _holds_nothing_of_a_sample(alone.path)
    _holds_nothing_of_a_sample(two.path)


def _holds_nothing_of_a_sample(run: Path) -> None:
    secret = bytes(range(32))
    for file in (each for each in run.rglob("*") if each.is_file()):
        data = file.read_bytes()
        assert PLANTED not in data, file
        assert b"1234.56" not in data, file
        assert secret not in data, file
    assert not list(run.glob("contents-*"))
    assert "dataset_known" not in (run / "events.jsonl").read_text()
    assert not read_records(run / "steps.bin", STEPS)["loss"].any()
    ledger = read_records(run / "ledger.bin", LEDGER)
    by_step = {}
    for record in ledger:
        step = int(record["step"])
        by_step[step] = by_step.get(step, 0) + int(record["stop"] - record["first"])
    assert len(set(by_step.values())) == 1  # how many samples a step had is not written


@pytest.mark.slow
def test_a_budget_ends_a_run_and_a_lost_secret_ends_it_too(tmp_path):
    done = trained(tmp_path, 3, epsilon=1.5, sampling="poisson")
    assert 0 < done.summary["steps"] < STEPS_OF_A_RUN
    assert done.summary["privacy"]["epsilon"] <= 1.5
    cut = trained(tmp_path, 2, sampling="poisson")
    for each in (tmp_path / "secrets").iterdir():
        each.unlink()
    with pytest.raises(SpecError, match="the secret of the run is not at"):
        resume_run(cut.path, ["train.steps=20"], quiet=True)


@pytest.mark.slow
def test_a_run_that_was_stopped_is_resumed_on_another_number_of_workers_to_the_same_bits(tmp_path):
    alone = trained(tmp_path, 1)
    cut = trained(tmp_path, 2, stop_after=7)
    assert cut.summary["steps"] == 7
    resumed = resume_run(cut.path, ["train.stop_after_steps=0", "workers=3"], quiet=True)
    assert resumed.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    for figure in ("released", "epsilon", "epsilon_lower"):
        assert resumed.summary["privacy"][figure] == alone.summary["privacy"][figure]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_more_workers_give_the_bits_of_one(tmp_path, workers):
    alone, more = trained(tmp_path, 1), trained(tmp_path, workers)
    assert more.summary["parameters_sha256"] == alone.summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_fifty_kills_leave_the_bits_and_publish_nothing_twice(tmp_path, workers):
    alone, killed = trained(tmp_path, 1, steps=MANY_STEPS), set[int]()
    often = trained(tmp_path, workers, killing_many(50, killed), steps=MANY_STEPS)
    assert len(killed) == 50
    assert often.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    found = often.summary["privacy"]
    assert (found["released"], found["released_again"]) == (MANY_STEPS, 0)
    assert often.summary["repeated_samples"] == often.summary["missing_samples"] == 0
