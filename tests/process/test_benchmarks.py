"""Benchmarks still start, find what they look for, and end what they started."""

import json
from pathlib import Path

import pytest
from started import Start

pytestmark = pytest.mark.process

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = {
    "against_torch": ["--case", "zero3", "--windows", 4],
    "bits": ["--model", "mlp", "--micro-batches", 2, "--windows", 4],
    "checkpoint": ["--megabytes", 4, "--turns", 2],
    "corruption": ["--case", "mlp, 8 micro-batches", "--windows", 4, "--steps", 20],
    "engine": ["--rounds", 1, "--steps", 5, "--starts", 1],
    "host_memory": ["--megabytes", 4, "--rounds", 3],
    "lattice": ["--model", "mlp", "--rounds", 2],
    "mesh_memory": ["--case", "1,2,2", "--steps", 1],
    "mesh_recovery": ["--millions", 1, "--shard", 2, "--kills", 1],
    "ray_losses": ["--raylets", 1, "--actors", 1, "--drains", 1],
    "server_recovery": ["--kills", 1, "--only", "server_async"],
    "startup": ["--rounds", 1],
    "pipeline": ["bubble", "--turns", 1],
    "tensor_plan": ["--width", 64, "--turns", 2, "--steps", 1],
}
"""Quick arguments; what they measure means nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_ends_with_figures_and_leaves_no_process(name: str, start: Start) -> None:
    program = start(BENCHMARKS / f"{name}.py", *QUICK[name])
    assert program.end() == 0, program.stderr
    assert any(letter.isdigit() for letter in program.stdout), "it printed no figure"
    program.check_no_process_is_left()


@pytest.mark.timed
def test_one_kill_of_each_is_measured_and_nothing_is_left(start: Start, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    few = ["--kills", 1, "--torchrun-kills", 1, "--rounds", 1, "--only", "instep", "torchrun"]
    program = start(BENCHMARKS / "recovery.py", *few, "--json", result)
    assert program.end() == 0, program.stderr
    systems = json.loads(result.read_text())["systems"]
    assert [systems[name]["kills"] for name in ("instep", "torchrun")] == [1, 1]
    assert systems["instep"]["turns"][0]["same_bits_as_undisturbed"]
    assert systems["instep"]["steps_redone_median"] == 0
    assert systems["torchrun"]["full_over_ours"]["median"] > 0
    program.check_no_process_is_left()
    program.check_no_file_is_left()
