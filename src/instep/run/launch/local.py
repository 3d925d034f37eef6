"""Processes on this machine: one fork server, told by the master whom to fork."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from instep.run.launch.base import INSIDE, Seat
from instep.run.processes import end_group

PATIENCE_S = 5.0
"""How long a fork server may take to end its workers and itself, before it is killed."""


class LocalLauncher:
    """Starts the fork server of this machine.

    It is a fresh interpreter and not a fork of this one: a program that calls
    `instep.train` may have threads or a CUDA context, which a fork breaks.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []

    def start(self, seat: Seat, logs: Path) -> None:
        """Start the fork server in a session of its own, so that Ctrl-C reaches only us."""
        with (logs / "host.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "instep.run.launch.fork_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(),
            )
        self._groups.append(self._process.pid)  # all that comes of it stays in its group
        assert self._process.stdin is not None
        note = {"host": seat.address.host, "port": seat.address.port, "token": seat.token}
        try:
            self._process.stdin.write(json.dumps(note).encode() + b"\n")  # not seen by `ps`
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; `ended` says so

    def ended(self) -> int | None:
        """The exit code of the fork server that was started last, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM makes the fork server kill its workers and end; SIGKILL ends what is left."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
        for group in self._groups:
            end_group(group, PATIENCE_S)
        process.wait()
        self._process = None


def _environment() -> dict[str, str]:
    """Ours, with one thread for libraries that would start a pool before the fork.

    And a mark by which a recipe that starts a run of its own is found out.
    """
    environment = {**os.environ, INSIDE: "1"}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"  # a worker sets its own number of threads
    return environment
