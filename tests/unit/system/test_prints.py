"""A line that cannot be printed ends nothing."""

import os
import subprocess
import sys

import pytest

PRINTS = """
import os
import sys
from instep.system.prints import spare_prints
spare_prints()
for n in range(2000):
    print("line", n)
sys.stdout.flush()
print("last", file=sys.stderr)
sys.stdout.flush()
os._exit(7)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("full", ["/dev/full", ""])
def test_a_worker_prints_on_though_its_log_is_on_a_full_disk(tmp_path, full, unbuffered):
    log = full or tmp_path / "log"
    with open(log, "ab") as file:
        command = [sys.executable, "-c", PRINTS]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    assert done.returncode == 7
    if not full:
        lines = (tmp_path / "log").read_text().split("\n")
        assert lines == [*(f"line {n}" for n in range(2000)), "last", ""]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_without_it_the_print_raises():
    program = PRINTS.replace("spare_prints()\n", "", 1)
    with open("/dev/full", "ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=file, stderr=file, check=False
        )
    assert done.returncode != 7
