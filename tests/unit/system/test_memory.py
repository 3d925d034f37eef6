"""How much memory a process may take."""

import os
import resource
from pathlib import Path

import pytest

from instep.system.memory import room


def test_a_limit_of_the_process_leaves_what_it_has_not_taken():
    wide = room(1)
    child = os.fork()
    if not child:
        used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + 10_000_000,) * 2)
        os._exit(0 if 0 < room(1) <= 10_000_000 <= wide else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_processes_of_a_machine_share_what_it_has():
    assert room(4) == pytest.approx(room(1) / 4, rel=0.2)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_limits_all_its_processes_and_cached_files_count_as_free(tmp_path, version):
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    kinds = "" if version == 2 else "memory"
    paths = [line.split(":", 2)[2] for line in lines if kinds in line.split(":", 2)[1].split(",")]
    if not paths:
        pytest.skip("this kernel shows no such cgroups")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
    limit, usage, cached = ("memory.max", "memory.current", "file") if version == 2 else v1
    outer = tmp_path if version == 2 else tmp_path / "memory"
    inner = outer / paths[0].lstrip("/")
    inner.mkdir(parents=True, exist_ok=True)
    for folder, most in ((inner, "max" if version == 2 else str(2**62)), (outer, "90000000")):
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text("50000000\n")
        (folder / "memory.stat").write_text(f"anon 3\n{cached} 20000000\n")
        if inner == outer:
            (folder / limit).write_text("90000000\n")
    assert room(3, tmp_path) == 20_000_000
