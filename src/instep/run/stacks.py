"""Where a process stands that answers no more: it can still be asked by a signal.

Every worker has the C part of Python write its stack into its log when the
signal comes, which needs neither the interpreter's lock nor a thread that
runs. Who asks, and what follows, is not known here.
"""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

from instep.errors import is_users

ASK = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""The signal that asks; one that user code hardly has a handler for."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


def stack_file(run: Path, worker: int) -> Path:
    """Where a worker's stack is written, among what it printed."""
    return run / "logs" / f"worker-{worker}.log"


def tell_when_asked() -> None:
    """Have this process write its stack to standard error whenever it is asked."""
    faulthandler.register(int(ASK), file=2, all_threads=True, chain=False)


def last_stack(file: Path, since_bytes: int) -> str:
    """What was written to a file after a place in it; empty while nothing was."""
    if not file.exists() or file.stat().st_size <= since_bytes:
        return ""
    with file.open("rb") as stacks:
        stacks.seek(since_bytes)
        return stacks.read().decode(errors="replace")


def deepest_line(stack: str) -> str:
    """`file.py:12 in name`: the innermost line of the main thread that is the user's own.

    That of a library, or ours, where no line of the user's is on the stack; empty
    where there is no stack.
    """
    frames = [match for line in _main_thread(stack) if (match := _FRAME.match(line))]
    own = [frame for frame in frames if is_users(Path(frame["file"]))]
    chosen = (own or frames)[:1]
    return next((f"{Path(f['file']).name}:{f['line']} in {f['name']}" for f in chosen), "")


def _main_thread(stack: str) -> list[str]:
    """The part of the thread that was there first; it is written last."""
    parts = re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)
    return parts[-1].split("\n")
