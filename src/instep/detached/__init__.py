"""Runs a command of instep in a session of its own, which outlives the process that started it.

It has a file locked from before it begins until it ends, so that one who comes later knows whether
it lives, and nobody starts it twice; its process id is in the file. Nothing here knows what the
command does. Ways in: `start`, `lives`, `interrupt_it`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from instep.plain_file import PRIVATE, plain, read_plain
from instep.system.processes import start_with_retries


def start(words: Sequence[str], lock: Path, log: Path) -> subprocess.Popen[bytes] | None:
    """Start a command.

    Args:
        words: what follows `instep` in it.
        lock: the file that it has locked.
        log: the file that its output is appended to.

    Returns:
        Its process; None if one that was started before still lives.

    Raises:
        OSError: it cannot be started.
    """
    return start_program([sys.executable, "-m", "instep", *words], lock, log)


def start_program(
    command: Sequence[str], lock: Path, log: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes] | None:
    """Start a program that may be another one, as `start` does.

    Args:
        command: its words.
        lock, log: as for `start`.
        variables: of its environment, beside those of this process.

    Raises:
        OSError: it cannot be started.
    """
    descriptor = locked(lock)
    if descriptor is None:
        return None
    try:
        # the shell writes the id of the process that it becomes: whoever starts it may die here
        script = 'echo $$ > "$0"; exec "$@"'
        shell = ["/bin/sh", "-c", script, str(lock), *command]
        with open(log, "ab", opener=plain) as output:
            return start_with_retries(
                shell,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(descriptor,),
                env={**os.environ, **(variables or {})},
            )
    finally:
        os.close(descriptor)


def locked(lock: Path) -> int | None:
    """Lock the file of a command that is about to start, and empty it.

    Returns:
        Its descriptor, which the command is to have; None if one that has it locked lives.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = plain(lock, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def holding(lock: Path) -> Iterator[bool]:
    """Lock a file for this process, unless the process that started it has locked it for it.

    Yields:
        Whether it is locked; False if another process has it.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = locked(lock)
    if descriptor is None:
        yield pid_of(lock) == os.getpid()
        return
    try:
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield True
    finally:
        os.close(descriptor)


def lives(lock: Path) -> bool:
    """Whether a command that has this file locked is there; False if none ever was."""
    try:
        with open(lock, "rb", opener=plain) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def pid_of(lock: Path) -> int | None:
    """The process of a command that lives."""
    if not lives(lock):
        return None
    return _said(lock, 0)


def has_begun(lock: Path) -> bool:
    """Whether a command that had this file locked has begun, also if it was killed since."""
    return _said(lock, 0) is not None


def exit_code(lock: Path) -> int | None:
    """The exit code of a command, if it has written that down; None also while it lives."""
    return None if lives(lock) else _said(lock, 1)


def _said(lock: Path, line: int) -> int | None:
    """A line that a command has written into the file that it has locked: its process, its code."""
    with suppress(OSError, ValueError, IndexError):
        return int(read_plain(lock).split()[line])
    return None


def interrupt_it(lock: Path) -> None:
    """Ask a run that lives to stop at its next step, and save, as Ctrl-C would."""
    if (pid := pid_of(lock)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # a shell may have it ignore Ctrl-C


def last_words(log: Path) -> str:
    """The error that a command has ended with, from its output; empty if it said none."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("instep: ")]
        return said[-1].removeprefix("instep: ") if said else ""
    return ""


def interrupt_all(lock: Path) -> None:
    """Ask a program that lives to end, and what it has started in its session, as Ctrl-C would."""
    if (pid := pid_of(lock)) is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
