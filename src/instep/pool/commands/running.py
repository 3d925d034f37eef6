"""A plain command as a job of a pool: run once, and how it has ended is written down.

Nobody knows what a command has done before it was killed. So it is never run a second time unless
somebody asks for that. The process that waits for it has a child that keeps it: whichever of the
two is killed, the other ends the command and all that it has started, and the lock of the job is
held until then. Ways in: `run_command` in the process that waits, `ending_of`.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from instep.plain_file import read_plain, replace_plain
from instep.pool.commands.descendants import adopt_orphans, end_descendants, reap
from instep.pool.jobs import PoolJob
from instep.system.processes import die_with_parent, on_signals, wait_for_child

STOP_S = 10.0
"""How long a command may take to end once it was asked to."""

ROOM_S = 1.0
"""Before an end is written once more, where there was no room."""

LOOK_S = 0.1
"""Between two looks whether somebody has asked for its end."""


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
    report, writes = os.pipe()
    asked, told = list[float](), False
    adopt_orphans()
    with on_signals(lambda *_: asked.append(time.monotonic())):
        keeper = os.fork()
        if not keeper:
            _be_keeper(job, writes, asked)
        os.close(writes)
        while wait_for_child(keeper, LOOK_S) is None:
            if asked and not told:
                told = True
                os.kill(keeper, signal.SIGTERM)
    with open(report, "rb") as pipe:
        said = pipe.read()
    if not said:  # the command was stopped, or its keeper killed
        end_descendants(STOP_S)
        return -signal.SIGKILL
    _write(ending, said)
    return msgspec.json.decode(said, type=CommandEnding).code


def _write(ending: Path, said: bytes) -> None:
    """Write how a command has ended; waits for room on a full disk, as nobody else knows."""
    while True:
        try:
            return replace_plain(ending, said, durable=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        time.sleep(ROOM_S)


def _be_keeper(job: PoolJob, report: int, asked: list[float]) -> NoReturn:
    """Keep a command in this process, which is a fork, and tell how it has ended."""
    code = 1
    try:
        signal.signal(signal.SIGUSR1, lambda *_: _end_at_once())
        adopt_orphans()
        die_with_parent(signal.SIGUSR1)
        ending = _kept(job, asked)
        if ending is not None:
            os.write(report, msgspec.json.encode(ending))
        code = 0
    finally:
        os._exit(code)


def _end_at_once() -> NoReturn:
    end_descendants(STOP_S)
    os._exit(1)


def _kept(job: PoolJob, asked: list[float]) -> CommandEnding | None:
    """Run a command to its end; None if it was asked to stop, and then nothing of it is left."""
    began, told, code = time.monotonic(), False, None
    try:
        process = subprocess.Popen(
            job.command,
            cwd=job.folder,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        return CommandEnding(127, 0.0, f"{job.command[0]!r} cannot be run: {error.strerror}")
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
        if asked and not told:
            told = _signal(process.pid, signal.SIGTERM)
        if asked and time.monotonic() - asked[0] > STOP_S:
            _signal(process.pid, signal.SIGKILL)
    if not told:
        return CommandEnding(code, time.monotonic() - began)
    while reap() or _signal(process.pid, 0):  # what it has started, and not waited for
        if time.monotonic() - asked[0] > STOP_S:
            _signal(process.pid, signal.SIGKILL)
            end_descendants(STOP_S)
            break
        time.sleep(0.02)
    return None


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
