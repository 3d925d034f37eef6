"""A process of a run flips bits: it is found and named, and the run ends as if it had not been."""

from pathlib import Path
from typing import Any

import pytest
from started import Start

import instep
from conftest import instep_run
from instep.events import STEPS, read_records
from instep.integrity.repeats import repeats_every
from marks import slow

pytestmark = pytest.mark.process

TRAIN: dict[str, Any] = {
    "steps": 40,
    "global_batch": 32,
    "micro_batches": 16,
    "determinism": "bits",
}
RECIPE = "flips.py:recipe"
SOUND = 14
"""Steps before the fault."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    runs = tmp_path_factory.mktemp("undisturbed")
    recipe = f"{Path(__file__).parent / 'recipes' / 'tiny.py'}:recipe"
    done = instep.train(recipe, runs=runs, seed=5, train=TRAIN, workers=1, quiet=True)
    return str(done.summary["parameters_sha256"])


@pytest.mark.tail
@pytest.mark.parametrize(
    ("fault", "workers", "what"),
    [
        slow("weight", 2, "parameter"),
        ("inverted", 2, "gradient"),
        slow("stuck", 3, "gradient"),
        slow("agreed", 3, "state"),
    ],
)
def test_a_process_that_flips_bits_is_named_and_leaves_no_trace_in_the_result(
    start: Start, tmp_path: Path, undisturbed: str, fault: str, workers: int, what: str
) -> None:
    file = tmp_path / "faulty"
    settings = [f"train.{key}={value}" for key, value in TRAIN.items()]
    settings += ["seed=5", f"workers={workers}", "check.corruption=true"]
    settings += [f"arguments.fault={fault}", f"arguments.file={file}", f"arguments.steps={SOUND}"]
    program = start(*instep_run(tmp_path, RECIPE, *settings))
    assert program.end() == 0, program.stderr
    (found,) = program.events("corruption_found")
    (pid,) = [e["pid"] for e in program.events("process_ended") if e["code"] < 0]
    joined = {e["pid"]: e["worker"] for e in program.events("worker_joined")}
    assert pid == int(file.read_text())
    assert found["what"] == what
    assert found["workers"] == [joined[pid]]
    assert SOUND < found["step"] <= SOUND + repeats_every(16, workers)
    assert found["clean_step"] < found["step"]
    summary = program.summary
    assert (summary["steps"], summary["corruptions"]) == (TRAIN["steps"], 1)
    assert summary["repeated_samples"] == summary["missing_samples"] == 0
    assert summary["parameters_sha256"] == undisturbed
    steps = read_records(program.run / "steps.bin", STEPS)
    assert set(steps["step"]) == set(range(1, TRAIN["steps"] + 1))
    program.check_nothing_is_left()


@pytest.mark.slow
def test_if_no_worker_has_a_copy_the_run_goes_back_before_the_fault(
    start: Start, tmp_path: Path, undisturbed: str
) -> None:
    file = tmp_path / "faulty"
    settings = [f"train.{key}={value}" for key, value in TRAIN.items()]
    settings += ["seed=5", "workers=2", "check.corruption=true"]
    settings += ["checkpoint.every=3", "checkpoint.keep_last=9"]
    settings += ["arguments.fault=inverted", f"arguments.file={file}", f"arguments.steps={SOUND}"]
    settings += ["arguments.lost=2"]  # who takes its place sees no comparison before the fault
    program = start(*instep_run(tmp_path, RECIPE, *settings))
    assert program.end() == 0, program.stderr
    (found,) = program.events("corruption_found")
    assert (found["step"], found["clean_step"]) == (20, -1)
    (back,) = program.events("went_back")
    # what was saved at 12, 15 and 18 is of no known worth; who was lost may have been writing 9
    assert back["resumed_step"] in (6, 9)
    summary = program.summary
    assert summary["repeated_samples"] == summary["missing_samples"] == 0
    assert summary["parameters_sha256"] == undisturbed
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_micro_batch_in_which_nothing_counts_is_no_corruption(
    start: Start, tmp_path: Path
) -> None:
    train = {"steps": 70, "global_batch": 16, "micro_batches": 16, "determinism": "bits"}
    settings = [f"train.{key}={value}" for key, value in train.items()]
    settings += ["workers=2", "check.corruption=true"]
    program = start(*instep_run(tmp_path, "half_ignored.py:recipe", *settings))
    assert program.end() == 0, program.stderr
    assert program.events("corruption_found") == []
    assert program.events("worker_failed") == []
