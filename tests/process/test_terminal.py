"""What stands on a person's terminal when a run has ended."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TINY, instep_run

pytestmark = pytest.mark.process


def on_a_terminal(command: list[object], folder: Path) -> str:
    """All that a command writes to its terminal, of 100 columns and 40 lines."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": "100", "LINES": "40", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, **size},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 1 << 16):
            said += piece
    except OSError:  # nobody has the other end open any more
        pass
    os.close(ours)
    assert program.wait() == 0, said.decode()
    return said.decode()


@pytest.mark.tail
def test_the_last_frame_is_that_of_the_end_and_the_result_has_its_own_line(
    tmp_path: Path,
) -> None:
    said = on_a_terminal(instep_run(tmp_path, "tiny.py:recipe", *TINY), tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "")
    table, _, result = plain.partition("\ndone in ")
    assert result, plain
    last = table[table.rindex("epoch ") :]
    assert last.startswith("epoch 3/3  step 21/21")
    assert "100 %" in last.splitlines()[0]
    assert "committed 303 samples" in last
    assert "checkpoint at step 21" in last
    assert said.count("\x1b[?25h") >= said.count("\x1b[?25l")  # the cursor is back
