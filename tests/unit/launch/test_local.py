"""A command before the fork server that ends before it has read what it is told."""

import subprocess
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
