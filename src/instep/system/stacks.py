"""Where a process stands that answers no more: it can still be asked by a signal.

Every worker has the C part of Python write its stack into its log when the
signal comes, which needs neither the interpreter's lock nor a thread that
runs. The signal goes to the first thread, and that writes its own stack alone:
of a process that was stopped any thread would take it, and who reads the
frames of another that is about to run reads them torn, or crashes. Where the
first waits for the thread that reads the data, that one is asked too, by a
signal that all others block. Who asks, and what follows, is not known here.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
from pathlib import Path

from instep import data
from instep.data.reading.threads import ASK_READER
from instep.errors import is_users
from instep.plain_file import plain

ASK = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""The signal that asks; one that user code hardly has a handler for."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_OUTERMOST = (" in _run_module_as_main", " in <module>", " in _bootstrap")
_READERS = Path(data.__file__).parent / "reading" / "readers.py"
_CUT_SHORT = "  ..."
"""Instead of the outermost frames, where there are more than a hundred."""


def stack_file(run: Path, worker: int) -> Path:
    """Where a worker's stack is written, among what it printed."""
    return run / "logs" / f"worker-{worker}.log"


def tell_when_asked() -> None:
    """Have this process write its stack to standard error whenever it is asked.

    To be called before there is a second thread.
    """
    if ASK_READER != ASK:  # as where there are real-time signals
        signal.pthread_sigmask(signal.SIG_BLOCK, [ASK_READER])  # the others inherit that
    for number in {ASK, ASK_READER}:
        faulthandler.register(int(number), file=2, all_threads=False, chain=False)


def send(pid: int, number: int) -> None:
    """Send a process a signal; the one that asks for the stack, to its first thread.

    Raises:
        ProcessLookupError: it is gone.
        PermissionError: it is not ours.
    """
    to_thread = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # Linux; os has none
    if number != ASK or to_thread is None:
        os.kill(pid, number)
    elif to_thread(pid, pid, int(number)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))  # of the class that belongs to the code


def last_stack(file: Path, since_bytes: int) -> str:
    """What was written to a file after a place in it; empty while nothing was."""
    if not file.is_file() or file.stat().st_size <= since_bytes:
        return ""
    with open(file, "rb", opener=plain) as stacks:
        stacks.seek(since_bytes)
        return stacks.read().decode(errors="replace")


def is_whole(stack: str) -> bool:
    """Whether a stack has been written to its end: a thread's outermost frame is last."""
    last = stack.rstrip("\n").rpartition("\n")[2]
    return stack.endswith("\n") and (last.endswith(_OUTERMOST) or last == _CUT_SHORT)


def waits_for_reader(stack: str) -> bool:
    """Whether the thread whose stack it is waits for the one that reads the data."""
    frames = (match for line in stack.split("\n") if (match := _FRAME.match(line)))
    return any(Path(f["file"]) == _READERS and f["name"] == "take" for f in frames)


def deepest_line(stack: str) -> str:
    """`file.py:12 in name`: the innermost line of the main thread that is the user's own.

    That of a library, or ours, where no line of the user's is on the stack; empty
    where there is no stack.
    """
    frames = [match for line in stack.split("\n") if (match := _FRAME.match(line))]
    own = [frame for frame in frames if is_users(Path(frame["file"]))]
    chosen = (own or frames)[:1]
    return next((f"{Path(f['file']).name}:{f['line']} in {f['name']}" for f in chosen), "")
