"""CPU time of `make test` in two checkouts, in turns: the whole process tree, and the ratio.

    python benchmarks/test_cpu.py ../before . --turns 2
    python benchmarks/test_cpu.py ../before . -- tests/unit/sync

It counts what every process has used that came of the command; those that outlive their parents are
given to it by the kernel. It does not know what a test is. Start with `main`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36


class Used(NamedTuple):
    """What one command took."""

    cpu_s: float
    wall_s: float
    code: int


def used(command: list[str], folder: Path) -> Used:
    """Run a command to the end of its last process, and count the CPU time of all."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    child, code = subprocess.Popen(command, cwd=folder, env=environment), 0
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == child.pid:
            code = os.waitstatus_to_exitcode(status)
    child.returncode = code
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Used(cpu_s, time.monotonic() - began, code)


def options_of(checkout: Path) -> list[str]:
    """Return the options of pytest in `make test` of a checkout."""
    target = re.search(r"^test:.*\n.* -m pytest (.*)$", (checkout / "Makefile").read_text(), re.M)
    assert target, f"{checkout}/Makefile has no target `test` that starts pytest"
    return target[1].split()


def main() -> int:
    """Measure both in turns, print each, and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs=2, type=Path, help="before, and after")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("tests", nargs="*", help="what to run of the suite; all of it")
    given = parser.parse_args()
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("this system gives nobody the orphans of their children (PR_SET_CHILD_SUBREAPER)")
    found: list[list[float]] = [[], []]
    for turn in range(1, given.turns + 1):
        for place, checkout in enumerate(path.resolve() for path in given.checkouts):
            words = ["-m", "pytest", *options_of(checkout), *given.tests]
            took = used([str(checkout / ".venv/bin/python"), *words], checkout)
            found[place].append(took.cpu_s)
            said = f"{took.cpu_s:.0f} s of CPU, {took.wall_s:.0f} s, exit code {took.code}"
            print(f"turn {turn}, {checkout}: {said}", flush=True)
    before, after = map(median, found)
    print(f"{after:.0f} s of {before:.0f} s: {after / before:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
