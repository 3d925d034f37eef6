"""A process that answers no more still says where it stands."""

import os
import re
import subprocess
import sys
import time

import pytest

from instep.run.stacks import ASK, deepest_line, last_stack, stack_file

PATIENCE_S = 30.0

HANGS = {
    "endless": "while True:\n        pass",
    "native": "re.match('(a+)+$', 'a' * 60 + 'b')",
}

PROGRAM = """
import os, re, sys, threading, time
from instep.run.stacks import tell_when_asked

def stand():
    {hang}

tell_when_asked()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
stand()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="signals of Linux")
@pytest.mark.parametrize("hang", sorted(HANGS))
def test_whatever_a_process_hangs_in_its_own_line_is_told(tmp_path, hang):
    file = tmp_path / "stuck.py"
    file.write_text(PROGRAM.format(hang=HANGS[hang]))
    log = stack_file(tmp_path, 3)
    log.parent.mkdir()
    log.write_bytes(b"printed before\n")
    size = log.stat().st_size
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, stderr=out)
    try:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)  # so that it stands where it will stand
        deadline = time.monotonic() + PATIENCE_S
        while "in <module>" not in last_stack(log, size):  # caught between two frames, none is told
            assert time.monotonic() < deadline, last_stack(log, size)
            process.send_signal(ASK)
            time.sleep(0.2)
        line = deepest_line(last_stack(log, size))
        assert re.fullmatch(r"stuck\.py:[678] in stand", line)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_without_a_line_of_the_users_the_innermost_of_all_is_told(tmp_path):
    stack = (
        "Thread 0x1 (most recent call first):\n"
        f'  File "{tmp_path}/other.py", line 3 in other\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/usr/lib/python3/site-packages/torch/x.py", line 9 in run\n'
        '  File "/usr/lib/python3/site-packages/torch/y.py", line 1 in <module>\n'
    )
    assert deepest_line(stack) == "x.py:9 in run"
    own = tmp_path / "mine.py"
    own.touch()
    assert deepest_line(stack + f'  File "{own}", line 12 in forward\n') == "mine.py:12 in forward"
    assert deepest_line("") == ""


def test_a_log_that_has_not_grown_or_is_not_there_says_nothing(tmp_path):
    log = tmp_path / "worker-0.log"
    assert last_stack(log, 0) == ""
    log.write_text("before\n")
    assert last_stack(log, 7) == ""
