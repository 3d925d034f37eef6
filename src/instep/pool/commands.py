"""A plain command as a job of a pool: run once, and how it has ended is written down.

Nobody knows what a command has done before it was killed. So it is never run a second time unless
somebody asks for that. Ways in: `run_command` in the process that waits for it, `ending_of`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from instep.plain_file import read_plain, replace_plain
from instep.pool.jobs import PoolJob
from instep.system.processes import die_with_parent, on_signals

STOP_S = 10.0
"""How long a command may take to end once it was asked to."""


class CommandEnding(msgspec.Struct, frozen=True):
    """How a command has ended."""

    code: int
    """Its exit code, negative for a signal."""
    seconds: float
    why: str = ""
    """Why it could not be started."""

    @property
    def text(self) -> str:
        """Why it has failed, in words."""
        return self.why or f"it ended with code {self.code}"


def run_command(job: PoolJob, ending: Path) -> int:
    """Run a job's command to its end.

    Args:
        job: of a command.
        ending: the file in which its end is written, unless it was stopped.

    Returns:
        Its exit code.
    """
    began, asked = time.monotonic(), list[float]()
    with on_signals(lambda *_: asked.append(time.monotonic())):
        try:
            process = subprocess.Popen(
                job.command,
                cwd=job.folder,
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            why = f"{job.command[0]!r} cannot be run: {error.strerror}"
            _write(ending, CommandEnding(127, 0.0, why))
            return 127
        told = False
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
                break
            if asked and not told:
                told = _signal(process.pid, signal.SIGTERM)
            if asked and time.monotonic() - asked[0] > STOP_S:
                _signal(process.pid, signal.SIGKILL)
        while told and _signal(process.pid, 0):  # what it has started, and not waited for
            time.sleep(0.1)
            if time.monotonic() - asked[0] > STOP_S:
                _signal(process.pid, signal.SIGKILL)
    if not told:
        _write(ending, CommandEnding(code, time.monotonic() - began))
    return code


def ending_of(ending: Path) -> CommandEnding | None:
    """How a command has ended; None if that was not written."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_plain(ending), type=CommandEnding)
    return None


def _signal(group: int, number: int) -> bool:
    """Signal all processes of a group; returns whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # those that are left are of another user, or macOS says so of zombies
        return number != 0
    return True


def _write(path: Path, ending: CommandEnding) -> None:
    replace_plain(path, msgspec.json.encode(ending), durable=True)
