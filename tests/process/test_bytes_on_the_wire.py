"""What a run says that it sent is what its hosts' interfaces sent, and what theory says."""

import json
from pathlib import Path

import pytest
from started import Start
from test_partitions import needs_hosts

pytestmark = [pytest.mark.process, pytest.mark.slow, needs_hosts]

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bytes_on_the_wire.py"


@pytest.mark.parametrize("case", ["all_reduce", "all_reduce, int4", "diloco, int4"])
def test_own_count_theory_and_the_kernels_counters_agree(
    case: str, start: Start, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    program = start(PROGRAM, "--only", case, "--megabytes", 4, "--json", result)
    assert program.end() == 0, program.stderr
    found = json.loads(result.read_text())["results"][1]
    assert found["name"] == case
    assert found["own_over_kernel"] == pytest.approx(1, abs=0.02)
    assert found["kernel_over_theory"] == pytest.approx(1, abs=0.05)
    program.check_no_process_is_left()
