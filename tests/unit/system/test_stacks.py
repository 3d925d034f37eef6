"""A process that answers no more still says where it stands."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from instep.data.reading.loader_process import LoaderProcess
from instep.data.reading.threads import ASK_READER, deepest_line, is_whole
from instep.system.processes import Watched
from instep.system.stacks import (
    ASK,
    last_stack,
    send,
    stack_file,
    waits_for_loader,
    waits_for_reader,
)

TIMEOUT_S = 600.0

HANGS = {
    "endless": "while True:\n        pass",
    "native": "re.match('(a+)+$', 'a' * 60 + 'b')",
}

PROGRAM = """
import os, re, sys, threading, time
from instep.system.stacks import write_stack_on_signal

def stand():
    print("ready", flush=True)
    {hang}

write_stack_on_signal()
def wakes():
    while True:
        time.sleep(0.001)

for _ in range({threads}):
    threading.Thread(target=wakes, daemon=True).start()
stand()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="signals of Linux")
@pytest.mark.parametrize("hang", sorted(HANGS))
def test_whatever_a_process_hangs_in_its_own_line_is_told(tmp_path, hang):
    with standing(tmp_path, HANGS[hang]) as (process, log):
        size = log.stat().st_size
        deadline = time.monotonic() + TIMEOUT_S
        while "in <module>" not in last_stack(log, size):  # caught between two frames, none is told
            assert time.monotonic() < deadline, last_stack(log, size)
            send(process.pid, ASK)
            time.sleep(0.2)
        line = deepest_line(last_stack(log, size))
        assert re.fullmatch(r"stuck\.py:[6-9] in stand", line)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="signals of Linux")
def test_of_a_process_that_was_stopped_the_first_thread_answers_each_time(tmp_path):
    """Any thread would take a signal that came while none ran."""
    with standing(tmp_path, "while True:\n        pass", threads=6) as (process, log):
        watched = Watched(process.pid)
        for _ in range(8):
            watched.signal(signal.SIGSTOP)
            until(lambda: watched.stopped)
            size = log.stat().st_size
            watched.signal(ASK)
            watched.signal(signal.SIGCONT)
            until(lambda: is_whole(last_stack(log, size)))  # noqa: B023
            assert re.fullmatch(r"stuck\.py:[6-9] in stand", deepest_line(last_stack(log, size)))
        watched.close()


READS = """
import sys, threading, time
from instep.system.stacks import write_stack_on_signal

write_stack_on_signal()
from instep.data.reading.readers import Ahead

def endless(part):
    print("ready", flush=True)
    while True:
        pass

def wakes():
    while True:
        time.sleep(0.001)

for _ in range(6):
    threading.Thread(target=wakes, daemon=True).start()
{idle}
reader = Ahead(endless)
reader.take(reader.submit(None))
"""

IDLE = """
others = [Ahead(lambda part: None) for _ in range(4)]  # as that of training while one validates
for other in others:
    other.take(other.submit(None))
""".strip()


@pytest.mark.grid(1)
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="signals of Linux")
@pytest.mark.parametrize("idle", ["", IDLE], ids=["alone", "beside idle ones"])
def test_where_the_first_thread_waits_for_a_read_the_reading_thread_tells_its_line(tmp_path, idle):
    with standing(tmp_path, program=READS.replace("{idle}", idle)) as (process, log):
        watched = Watched(process.pid)

        def told():
            size = log.stat().st_size
            watched.signal(ASK)
            until(lambda: is_whole(last_stack(log, size)))
            return last_stack(log, size)

        until(lambda: waits_for_reader(told()))  # the reader says "ready" before the first waits
        for _ in range(4):
            assert waits_for_reader(told())
            first = log.stat().st_size
            watched.signal(ASK_READER)
            until(lambda: is_whole(last_stack(log, first)))  # noqa: B023
            line = deepest_line(last_stack(log, first))  # of the two, the first is ours too
            assert re.fullmatch(r"stuck\.py:1[012] in endless", line)
        watched.close()


@contextmanager
def standing(folder, hang="", *, threads=1, program=PROGRAM):
    """A program that hangs, with threads that wake up now and then; and its log."""
    file = folder / "stuck.py"
    file.write_text(program.format(hang=hang, threads=threads))
    log = stack_file(folder, 3)
    log.parent.mkdir()
    log.write_bytes(b"printed before\n")
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, stderr=out)
    try:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)  # so that it stands where it will stand
        yield process, log
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


WHOLE = """Stack (most recent call first):
  File "/home/me/net.py", line 3 in forward
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_a_stack_is_taken_once_it_has_been_written_to_its_end():
    parts = [WHOLE[:size] for size in range(len(WHOLE) + 1)]
    assert [part for part in parts if is_whole(part)] == [WHOLE]
    assert is_whole('Stack:\n  File "a.py", line 3 in forward\n  ...\n')


def test_without_a_line_of_the_users_the_innermost_of_all_is_told(tmp_path):
    stack = (
        "Stack (most recent call first):\n"
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


def test_a_stack_that_waits_for_a_loader_process_is_told_from_others():
    code = LoaderProcess._message.__code__
    line = f'  File "{code.co_filename}", line 300 in {code.co_name}\n'
    assert waits_for_loader('  File "/usr/lib/selectors.py", line 415 in select\n' + line)
    assert not waits_for_loader(line.replace("loader_process.py", "readers.py"))
