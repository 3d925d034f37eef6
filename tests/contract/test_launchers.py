"""Every launcher keeps the promises of `launch/base.py`, with a real fork server."""

import os
import signal
import time

import psutil
import pytest

from instep.comm.channel import Address, listen
from instep.comm.endpoint import Endpoint
from instep.launch import LAUNCHERS

pytestmark = pytest.mark.process

ARGUMENTS = {"hosts": (["env"],)}
"""What a launcher needs if the job names hosts; one that needs none is called without."""

SOON_S = 30.0


@pytest.fixture
def launched(tmp_path):
    """A launcher by name, with its one fork server started; ended after the test."""
    master, made = listen(), []

    def launch(name):
        made.append(LAUNCHERS[name](*ARGUMENTS.get(name, ())))
        made[0].start(Endpoint(Address(*master.getsockname()), "secret", 0), tmp_path)
        return made[0]

    yield launch
    for each in made:
        each.stop()
    master.close()


def fork_servers():
    """What was started for this test and lives, the fork server and whatever stands before it."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]


def until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_host_runs_until_it_is_told_to_stop_and_nothing_is_left(launched, name):
    launcher = launched(name)
    started = fork_servers()
    assert started
    assert launcher.ended() is None
    assert not any("secret" in word for process in started for word in process.cmdline())
    launcher.stop()
    launcher.stop()
    assert fork_servers() == []


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_host_that_was_stopped_is_killed_and_one_that_runs_is_not(launched, name):
    launcher = launched(name)
    launcher.end_if_stopped()
    assert launcher.ended() is None
    for process in fork_servers():
        process.send_signal(signal.SIGSTOP)
    until(lambda: all(process.status() == "stopped" for process in fork_servers()))
    launcher.end_if_stopped()
    until(lambda: launcher.ended() is not None)
    assert launcher.ended() == -signal.SIGKILL
