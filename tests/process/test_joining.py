"""Training inside processes that somebody else started."""

import json
from pathlib import Path
from typing import Any

import pytest
from started import RECIPES, Start, Started, distance

pytestmark = pytest.mark.process

TWICE, RAISES = RECIPES / "joins_twice.py", RECIPES / "joins_and_raises.py"


def slurm_task(number: int) -> dict[str, str]:
    """What Slurm sets for one of two tasks on one node."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
    }


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of a script that was started without any company."""
    folder = tmp_path_factory.mktemp("alone")
    program = Started(folder, [TWICE, folder / "runs"])
    try:
        assert program.end() == 0, program.stderr
        assert program.listened <= {"127.0.0.1"}
        program.check_no_process_is_left()
    finally:
        program.kill()
    return folder / "runs"


def check_both_runs(runs: Path, alone: Path) -> None:
    """That two processes came to what one did."""
    assert {path.name for path in runs.iterdir()} == {"recipe", "own"}  # and no meeting file
    for name, steps in (("recipe", 14), ("own", 12)):
        one, two = summary_of(alone / name), summary_of(runs / name)
        assert (one["workers"], two["workers"]) == (1, 2)
        assert one["outcome"] == two["outcome"] == "completed"
        assert one["steps"] == two["steps"] == steps
        assert one["samples"] == two["samples"] == 202
        assert two["repeated_samples"] == two["missing_samples"] == 0
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert distance(alone / name, runs / name) < 1e-6


def test_two_processes_of_torchrun_come_to_what_one_process_does(
    start: Start, tmp_path: Path, alone: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = start(*torchrun, TWICE, tmp_path / "runs")
    assert program.end() == 0, program.stderr
    check_both_runs(tmp_path / "runs", alone)
    program.check_no_process_is_left()


def test_two_tasks_of_slurm_come_to_what_one_process_does(
    start: Start, tmp_path: Path, alone: Path
) -> None:
    programs = [
        start(TWICE, tmp_path / "runs", environment=slurm_task(number)) for number in (1, 0)
    ]
    for program in programs:
        assert program.end() == 0, program.stderr
        assert program.listened <= {"127.0.0.1"}
        program.check_no_process_is_left()
        program.check_no_file_is_left()
    check_both_runs(tmp_path / "runs", alone)


def test_a_process_that_raises_ends_the_other_with_the_cause(start: Start, tmp_path: Path) -> None:
    zero, one = (
        start(RAISES, tmp_path / "runs", environment=slurm_task(number)) for number in (0, 1)
    )
    assert one.end() == 1
    assert "ValueError: process 1 has had enough" in one.stderr
    assert zero.end() != 0
    assert "worker 1 failed at step " in zero.stderr
    assert "ValueError: process 1 has had enough" in zero.stderr
    summary = summary_of(tmp_path / "runs" / "raises")
    assert (summary["outcome"], summary["steps"]) == ("failed", 2)
    for program in (zero, one):
        program.check_no_process_is_left()
        program.check_no_file_is_left()
