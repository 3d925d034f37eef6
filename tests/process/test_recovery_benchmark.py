"""The recovery benchmark finds what it looks for, and ends what it started."""

import json
from pathlib import Path

import pytest
from started import Start

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "recovery.py"


@pytest.mark.timed
@pytest.mark.timeout(400)
@pytest.mark.process
def test_one_kill_of_each_is_measured_and_nothing_is_left(start: Start, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    few = ["--kills", 1, "--torchrun-kills", 1, "--rounds", 1, "--only", "instep", "torchrun"]
    program = start(BENCHMARK, *few, "--json", result)
    assert program.end(300) == 0, program.stderr
    systems = json.loads(result.read_text())["systems"]
    assert [systems[name]["kills"] for name in ("instep", "torchrun")] == [1, 1]
    assert systems["instep"]["turns"][0]["same_bits_as_undisturbed"]
    assert systems["instep"]["steps_redone_median"] == 0
    assert systems["torchrun"]["full_over_ours"]["median"] > 0
    program.check_no_process_is_left()
    program.check_no_file_is_left()
