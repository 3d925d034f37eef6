"""A worker of a preparation on this machine: a process that is given tasks on a pipe.

It is watched by its exit and by its silence (`system/lease.py`). Ways in: `LocalWorker`; `Worker`
has what the crew asks of a worker anywhere.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from instep.control.decisions.endings import signal_name
from instep.prepare.messages import Beat, Setup, Task
from instep.prepare.workers.failed import last_line
from instep.prepare.workers.printed import Printed
from instep.system.environment import POOLS
from instep.system.lease import Lease
from instep.system.processes import start_with_retries

_MOST_TIMES = 4


class Worker(Protocol):
    """A worker as the crew sees it, wherever it is."""

    task: Task | None
    """Its present task."""
    at: Beat
    """Its last sign of life."""
    near: bool
    """Whether its machine has the folder of results."""
    blamed: bool
    """Whether it may be its task that has ended it."""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""

    @property
    def how(self) -> str:
        """How it ended."""

    @property
    def printed(self) -> str:
        """The last line that it printed; empty if there is none."""

    def give(self, task: Task) -> None:
        """Give it a task."""

    def close(self) -> None:
        """Nothing more is asked of it."""


class LocalWorker:
    """A process of this machine.

    Args:
        setup: its first message.
        log: file for what it prints.
        times: how many were lost before; each doubles how long one may be silent.
    """

    def __init__(self, setup: Setup, log: Path, times: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.connection: Connection = ours
        command = [sys.executable, "-m", "instep.prepare.workers.process", str(theirs.fileno())]
        environment = {**os.environ, **dict.fromkeys(POOLS, "1")}  # workers are as many as cores
        package = str(Path(__file__).parents[2])  # also where instep is only on sys.path
        paths = [package, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with open(log, "ab") as file:
            self.process = start_with_retries(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self.log, self._printed = log, Printed(log)
        self.task: Task | None = None
        self.at = Beat()
        self.killed, self.gone = "", False
        self.near, self.blamed = True, True
        self.lease = Lease(self.process.pid, time.monotonic(), times=min(times, _MOST_TIMES))
        self.send(setup)

    def send(self, message: msgspec.Struct) -> None:
        """Send it a message; if it is gone, that is seen elsewhere."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, body: bytes) -> None:
        """Send it a message that is encoded already."""
        with suppress(OSError):
            self.connection.send_bytes(body)

    def give(self, task: Task) -> None:
        """Give it a task."""
        self.task = task
        self.send(task)

    def kill(self, how: str = "") -> None:
        """End it at once."""
        self.killed = self.killed or how
        self.process.kill()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def turn(self, now: float) -> None:
        """Let time pass; kills it if it hangs."""
        self._printed.cut()
        if how := "it hung up" if self.gone else self.lease.turn(now):
            self.kill(how)

    @property
    def printed(self) -> str:
        """The last line that it printed."""
        return last_line(self.log)

    def close(self) -> None:
        """Wait until it is gone, and all that it has started."""
        if self.process.returncode is None:  # else its id may be another's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()

    @property
    def how(self) -> str:
        """How it ended."""
        code = self.process.wait()
        if self.killed:
            return self.killed
        return f"it was killed by {signal_name(code)}" if code < 0 else f"it ended with code {code}"
