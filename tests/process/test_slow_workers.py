"""A worker that is slow stays, and gets less work; what comes out does not show it."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from started import Start, Started

from instep.events import STEPS, read_records
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

RECIPE = "one_is_slow.py:recipe"
JOB = ("seed=5", "train.steps=150", "train.global_batch=16", "train.determinism=bits")


def check_ledger(program: Started) -> None:
    """What the ledger says of each step is what each worker said of itself."""
    ledger = program.ledger
    done = {(int(r["step"]), int(r["worker"])): int(r["stop"] - r["first"]) for r in ledger}
    told = read_records(program.run / "steps.bin", STEPS)  # who was killed told not quite all
    assert len(told) > 1.5 * int(ledger["step"].max())
    assert all(done[int(r["step"]), int(r["worker"])] == r["samples"] for r in told)


@pytest.mark.timed
def test_a_slow_worker_gets_less_and_the_bits_are_those_of_one_process(
    run: Start, tmp_path: Path
) -> None:
    """A kill in the middle of an uneven deal included; the next generation begins evenly."""
    mark = tmp_path / "slow"
    program = run(RECIPE, *JOB, f"arguments.mark={mark}")
    program.until(program.is_training, "training")
    pids = {e["pid"]: e["worker"] for e in program.events("worker_joined")}
    slow = pids[int(mark.read_text())]
    program.until(lambda: bool(program.events("work_dealt")), "dealing anew")
    os.kill(next(pid for pid, worker in pids.items() if worker != slow), signal.SIGKILL)
    assert program.end() == 0, program.stderr
    dealt = program.events("work_dealt")
    for generation in (1, 2):
        first = next(e for e in dealt if e["generation"] == generation)
        assert first["reason"] == "speed"
        assert first["micro_batches"][slow] < 4 < first["micro_batches"][1 - slow]
    ledger = program.ledger
    late = ledger[ledger["step"] >= first["step"]]
    its = late[late["worker"] == slow]
    assert (its["stop"] - its["first"]).sum() < (late["stop"] - late["first"]).sum() / 3
    assert np.unique(late["worker"]).tolist() == [0, 1]
    check_ledger(program)
    assert program.summary["generations"] == 2  # nobody was sent away for being slow

    alone = run(RECIPE, *JOB, f"arguments.mark={mark}", "arguments.sample_s=0", "workers=1")
    assert alone.end() == 0, alone.stderr
    assert alone.events("work_dealt") == []
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    proof = RunFolder(program.run).audit
    assert proof.exact
    assert proof.sha256 == RunFolder(alone.run).audit.sha256
