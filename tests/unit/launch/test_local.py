"""What becomes of a process that was started: one that ends at once, one that is lost."""

import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep.comm.protocol.endpoint import Switchboard
from instep.launch import local


@pytest.mark.parametrize("lifeline", [False, True])
def test_a_command_that_ended_before_it_was_told_anything_is_seen_as_ended(
    lifeline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = local.start_with_retries

    def ended(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = begun(*args, **kwargs)
        process.wait()
        return process

    monkeypatch.setattr(local, "start_with_retries", ended)
    launcher = local.LocalLauncher(["sh", "-c", "exit 3"], lifeline=lifeline)
    board = Switchboard()
    try:
        launcher.start(board.endpoint, tmp_path)
        assert launcher.ended() == 3
    finally:
        board.close()
        launcher.stop()


def test_a_program_that_is_lost_and_lives_ends_when_another_takes_its_place(
    tmp_path: Path,
) -> None:
    """A host of a preparation that hangs, or was stopped behind a command."""
    launcher = local.LocalLauncher(["sh", "-c", "kill -STOP $$; :"])
    board = Switchboard()
    try:
        endpoint = replace(board.endpoint, program="instep.prepare.workers.host")
        launcher.start(endpoint, tmp_path)
        first = launcher._process
        launcher.start(endpoint, tmp_path)
        assert isinstance(first, subprocess.Popen)
        assert first.wait(60) == -signal.SIGKILL
        assert launcher.ended() is None
    finally:
        launcher.kill()
        board.close()
        launcher.stop()
