"""Programs of a test that are forks of a process which has imported torch and instep, once.

The client, the master and the fork server of a run import for three seconds and more; a fork is
there in milliseconds. A pool starts its jobs like that (`instep.launch.warm`), and as there, what
replaces one of them later is a fresh interpreter. Way in: `Forked`, `warm_roles`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forks import MARK, UNMARKED
from instep.system.environment import settings
from instep.system.processes import wait_readable

PROGRAM = Path(__file__).with_name("forks.py")

READ_ONCE = re.compile(r"PYTHON(?!PATH$)|LC_|LANG|LD_|MALLOC_|OMP_|MKL_|TORCH")
"""Variables that an interpreter or a library reads when it is loaded."""


class Forked:
    """A program that was forked; what `Popen` says of one.

    Args:
        role: `instep` for a command, `instep-master` or `instep-host`.
        files: of ours, by the number that each has in the program; the first three are needed.
        words: of a command, after `instep`.
        folder: where it works.
        environment: all of it.
        owner: the process with which it ends.
    """

    def __init__(
        self,
        role: str,
        files: Mapping[int, int],
        *,
        words: Collection[str] = (),
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        owner: int = 0,
    ) -> None:
        wanted = {
            "role": role,
            "numbers": list(files),
            "words": list(words),
            "folder": str(folder or Path.cwd()),
            "environment": dict(environment),
            "owner": owner,
        }
        self.stdin: Any = None
        self.returncode: int | None = None
        self._told, tell = os.pipe()
        try:
            _send(json.dumps(wanted).encode(), [tell, *files.values()])
        finally:
            os.close(tell)
        self.pid = self._next("pid")

    def _next(self, what: str) -> int:
        """What is said of it next: its process, and then its exit code."""
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(self._told, 1)
            assert byte, "the process that forks has ended"
            text += byte
        said, number = text.decode().split()
        assert said == what, f"it ended with code {number} before it had begun"
        return int(number)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code."""
        if self.returncode is None:
            if not wait_readable([self._told], 1e6 if timeout is None else timeout):
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            self.returncode = self._next("code")
            os.close(self._told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class _ForkedRole(Forked):
    """In the place of `instep.launch.warm.ForkedProgram`: a fork of that process, not of ours."""

    def __init__(
        self,
        main: Callable[[], object],
        *,
        name: str,
        output: int,
        errors: int,
        keep: Collection[int] = (),
    ) -> None:
        reads, writes = os.pipe()
        own = settings() if name == "instep-host" else {}
        files = {0: reads, 1: output, 2: errors, **{number: number for number in keep}}
        try:
            whole = {**os.environ, **own}
            super().__init__(name, files, environment=whole, owner=os.getpid())
        finally:
            os.close(reads)
        self.stdin = os.fdopen(writes, "wb", buffering=0)


@contextlib.contextmanager
def warm_roles() -> Iterator[None]:
    """Have the first master and the first fork server of each run that is started here forked."""
    with contextlib.ExitStack() as patches:
        for place in ("instep.launch.local", "instep.client.watchdog"):
            patches.enter_context(patch(f"{place}.is_warm", lambda: True))
            patches.enter_context(patch(f"{place}.ForkedProgram", _ForkedRole))
        yield


_began = dict(os.environ)
_lock = threading.Lock()
_asks: socket.socket | None = None
"""The way to the process that forks; forks of this one have it too."""


def _send(note: bytes, files: Collection[int]) -> None:
    """Hand over a program to be forked."""
    with _lock:
        socket.send_fds(_asks or begin(), [note], list(files))


def begin() -> socket.socket:
    """Begin the process that forks; otherwise it begins when it is needed first."""
    global _asks
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-P", PROGRAM, str(theirs.fileno())],
        env={**_began, MARK: UNMARKED},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    atexit.register(_end, process, os.getpid())
    _asks = ours
    return ours


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
