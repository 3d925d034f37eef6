"""One result to the bit: on any number of processes, stopped anywhere, resumed at any size."""

import json
from pathlib import Path

import pytest
from started import RECIPES, Started

from instep.state.files.manifest import read_manifest
from instep.state.intact import newest_intact
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process


def tasks(folder: Path, count: int, runs: Path, *settings: str) -> None:
    """Train every kind on so many processes, as Slurm would start them."""
    programs = []
    try:
        for number in range(count):
            environment = {
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": folder.name,
                "SLURM_NNODES": "1",
                "SLURM_NTASKS": str(count),
                "SLURM_NTASKS_PER_NODE": str(count),
                "SLURM_PROCID": str(number),
                "SLURM_LOCALID": str(number),
            }
            command = [RECIPES / "joins_for_all.py", runs, *settings]
            programs.append(Started(folder / str(number), command, environment))
        for program in programs:
            assert program.end() == 0, program.stderr
            program.check_no_process_is_left()
    finally:
        for program in programs:
            program.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process that nothing disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    tasks(folder, 1, folder / "runs")
    return folder / "runs"


def bits(run: Path) -> dict[str, str]:
    """What a run came to: SHA-256 of its parameters, and of each file of its last checkpoint."""
    summary = json.loads((run / "summary.json").read_text())
    checkpoint = newest_intact(run / "checkpoints")[0]
    assert checkpoint is not None
    files = {name: file.sha256 for name, file in read_manifest(checkpoint).files.items()}
    return {"parameters": summary["parameters_sha256"], **files}


def check_same(runs: Path, alone: Path) -> None:
    """Parameters, optimizer, scheduler and lattice have the bits of one process."""
    kinds = [path.name for path in alone.iterdir() if path.name != "mlp-in-order"]
    assert len(kinds) == 9
    assert {kind: bits(runs / kind) for kind in kinds} == {
        kind: bits(alone / kind) for kind in kinds
    }
    for kind in kinds:
        proof = RunFolder(runs / kind).audit
        assert proof.exact
        assert proof.sha256 == RunFolder(alone / kind).audit.sha256
        assert proof.used == 202


@pytest.mark.parametrize("count", [slow(n) for n in (2, 3, 4, 5)])
def test_any_number_of_processes_leaves_the_bits_that_one_leaves(
    tmp_path: Path, alone: Path, count: int
) -> None:
    tasks(tmp_path, count, tmp_path / "runs")
    check_same(tmp_path / "runs", alone)
    # in order mode the sums round as they are cut: the check above could have failed
    apart = bits(tmp_path / "runs" / "mlp-in-order"), bits(alone / "mlp-in-order")
    assert apart[0]["parameters"] != apart[1]["parameters"]


@pytest.mark.slow
def test_a_run_that_was_stopped_twice_and_resumed_at_other_sizes_leaves_the_same_bits(
    tmp_path: Path, alone: Path
) -> None:
    for count, stop in ((2, 3), (3, 7), (1, 0)):  # within an epoch, and within the next
        folder = tmp_path / f"on-{count}"
        tasks(folder, count, tmp_path / "runs", f"stop_after_steps={stop}")
    check_same(tmp_path / "runs", alone)
