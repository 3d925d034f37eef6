"""A program that is a fork looks from outside as one that was started: tests rely on it."""

import os
import signal
import subprocess

import pytest
from started import Start

from warm import Forked

pytestmark = pytest.mark.process


def test_a_forked_program_has_a_mark_a_folder_an_exit_code_and_ends_by_a_signal(start: Start):
    program = start("-m", "instep", "run", "nowhere.toml")
    assert isinstance(program.process, Forked)
    assert program.end() == 2
    assert program.stderr.startswith("instep: ")
    made = start("-m", "instep", "init", "vision")
    assert made.end() == 0
    assert list(made.work.iterdir())
    assert program.processes() == []
    lasts = start("-m", "instep", "dashboard", ".", "--port", "0")
    assert lasts.process.pid in [each.pid for each in lasts.processes()]
    with pytest.raises(subprocess.TimeoutExpired):
        lasts.process.wait(0.0)
    lasts.process.send_signal(signal.SIGKILL)
    assert lasts.process.wait() == -signal.SIGKILL
    assert lasts.process.poll() == -signal.SIGKILL
    assert lasts.processes() == []


@pytest.mark.cold
def test_a_cold_one_is_a_fresh_interpreter(start: Start):
    program = start("-m", "instep", "--help")
    assert isinstance(program.process, subprocess.Popen)
    assert program.end() == 0
    assert "usage: instep" in program.stdout


def test_a_role_ends_with_the_process_that_asked_for_it(tmp_path):
    owner = subprocess.Popen(["sleep", "1000"])
    reads, writes = os.pipe()
    with open(tmp_path / "log", "wb") as log:
        files = {0: reads, 1: log.fileno(), 2: log.fileno()}
        role = Forked("instep-master", files, owner=owner.pid)  # it waits for its note
    os.close(reads)
    owner.kill()
    owner.wait()
    assert role.wait() == -signal.SIGKILL
    os.close(writes)
