"""Stack dumps of a worker that no longer answers: a signal makes it write its stack.

Every worker registers `faulthandler`, whose C code writes the stack into the worker's log
when the signal comes; that needs neither the interpreter's lock nor a running thread. The
signal goes to the first thread, which writes its own stack only: in a stopped process any
thread would take the signal, and reading the frames of another thread that is about to
run gives torn frames, or crashes. If the first thread waits for the thread that reads the
data, that one is asked too, by a signal that all other threads block. Who asks, and what
follows, is not known here.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from instep import data
from instep.data.reading.threads import ASK_READER, FRAME
from instep.plain_file import plain

ASK = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""The signal that asks for the stack; user code rarely handles it."""

_READERS = Path(data.__file__).parent / "reading" / "readers.py"
_LOADER = _READERS.with_name("loader_process.py")


def stack_file(run: Path, worker: int) -> Path:
    """The file that a worker's stack is written to: its log."""
    return run / "logs" / f"worker-{worker}.log"


def write_stack_on_signal() -> None:
    """Make this process write its stack to standard error on each signal that asks for it.

    Call it before there is a second thread.
    """
    if ASK_READER != ASK:  # the system has real-time signals
        signal.pthread_sigmask(signal.SIG_BLOCK, [ASK_READER])  # the others inherit that
    for number in {ASK, ASK_READER}:
        faulthandler.register(int(number), file=2, all_threads=False, chain=False)


def send(pid: int, number: int) -> None:
    """Send a process a signal; the signal that asks for the stack goes to its first thread.

    Raises:
        ProcessLookupError: it is gone.
        PermissionError: it is not ours.
    """
    to_thread = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # Linux; os has none
    if number != ASK or to_thread is None:
        os.kill(pid, number)
    elif to_thread(pid, pid, int(number)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))  # Python chooses the subclass by the code


def last_stack(file: Path, since_bytes: int) -> str:
    """What was written to a file after a position; empty while nothing was."""
    if not file.is_file() or file.stat().st_size <= since_bytes:
        return ""
    with open(file, "rb", opener=plain) as stacks:
        stacks.seek(since_bytes)
        return stacks.read().decode(errors="replace")


def waits_for_reader(stack: str) -> bool:
    """Whether the thread of this stack waits for the thread that reads the data."""
    return _is_in(stack, _READERS, "take")


def waits_for_loader(stack: str) -> bool:
    """Whether it waits for a loader process, whose own line the worker has told."""
    return _is_in(stack, _LOADER, "_message")


def _is_in(stack: str, file: Path, name: str) -> bool:
    frames = (match for line in stack.split("\n") if (match := FRAME.match(line)))
    return any(Path(f["file"]) == file and f["name"] == name for f in frames)
