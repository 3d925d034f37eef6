"""A detached command has its file locked as long as it lives, and is not started twice."""

import signal

import pytest

from instep import detached


@pytest.mark.process
def test_a_detached_command_is_found_by_its_lock_and_not_started_twice(tmp_path):
    lock, log = tmp_path / "lock", tmp_path / "log"
    assert not detached.lives(lock)
    assert detached.pid_of(lock) is None
    started = detached.start(["logs", "--follow", str(tmp_path / "none")], lock, log)
    started.send_signal(signal.SIGSTOP)
    assert detached.lives(lock)
    assert detached.start(["list"], lock, log) is None
    started.send_signal(signal.SIGCONT)
    assert started.wait() == 6
    assert not detached.lives(lock)
    assert int(lock.read_text()) == started.pid
    assert "there is no run at" in log.read_text()
    again = detached.start(["list", str(tmp_path / "none")], lock, log)
    assert again.wait() == 6
