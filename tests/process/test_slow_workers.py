"""A worker that is slow stays, and gets less work; what comes out does not show it."""

from pathlib import Path

import pytest
from started import Start

from instep.report.run_folder import RunFolder

pytestmark = pytest.mark.process

JOB = ("seed=5", "train.steps=120", "train.global_batch=16", "train.determinism=bits")


def test_a_slow_worker_gets_less_and_the_bits_are_those_of_one_process(
    run: Start, tmp_path: Path
) -> None:
    recipe, mark = "one_is_slow.py:recipe", tmp_path / "slow"
    program = run(recipe, *JOB, f"arguments.mark={mark}")
    assert program.end() == 0, program.stderr
    (slow,) = [
        e["worker"] for e in program.events("worker_joined") if e["pid"] == int(mark.read_text())
    ]
    first, *_ = program.events("work_dealt")
    assert first["reason"] == "speed"
    assert first["micro_batches"][slow] < 4 < first["micro_batches"][1 - slow]
    ledger = program.ledger
    late = ledger[ledger["step"] >= first["step"]]
    its = late[late["worker"] == slow]
    assert (its["stop"] - its["first"]).sum() < (late["stop"] - late["first"]).sum() / 3
    assert set(late["worker"]) == {0, 1}
    assert program.summary["generations"] == 1  # nobody was sent away for it

    alone = run(recipe, *JOB, f"arguments.mark={mark}", "arguments.sample_s=0", "workers=1")
    assert alone.end() == 0, alone.stderr
    assert alone.events("work_dealt") == []
    assert program.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    proof = RunFolder(program.run).audit
    assert proof.exact
    assert proof.sha256 == RunFolder(alone.run).audit.sha256
