"""Processes on this machine: one fork server, which forks the workers that the master asks for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import RunError
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.warm import ForkedProgram, is_warm
from instep.plain_file import plain
from instep.store.folder import host_log
from instep.system.environment import END, settings
from instep.system.processes import end_group, is_stopped, start_with_retries

TIMEOUT_S = 5.0
"""How long a fork server may take to end its workers and itself, before it is killed."""


class LocalLauncher:
    """Starts the fork server of this machine.

    It is a fresh interpreter and not a fork of this one: a program that calls
    `instep.train` may have threads or a CUDA context, which a fork breaks. Only a client that was
    forked from a process that is kept warm (`cli/preloaded.py`) forks the first.

    Args:
        before: words of a command that runs the one after it, elsewhere or otherwise.
        lifeline: whether all that it starts ends with this process, and the memory that workers
            leave too, though the run may continue.
    """

    def __init__(self, before: Sequence[str] = (), *, lifeline: bool = False) -> None:
        self._before, self._lifeline = list(before), lifeline
        self._process: subprocess.Popen[bytes] | ForkedProgram | None = None
        self._groups: list[int] = []

    @classmethod
    def of(cls, job: JobSpec) -> LocalLauncher:
        """Any job can run here."""
        return cls()

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """As it is: there is one host, and it is here."""
        return launch

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Start the fork server in a session of its own, so that Ctrl-C reaches only us.

        Another program replaces the one before, which was lost; a fork server may have a spare.

        Raises:
            RunError: the command before it is none.
        """
        if endpoint.program and self._process is not None and self._process.poll() is None:
            end_group(self._process.pid, TIMEOUT_S)
            self._process.poll()
        with open(host_log(logs, endpoint.host), "ab", opener=plain) as log:
            # one that replaces another is a fresh interpreter, whatever has happened here since
            if not (self._before or self._groups or endpoint.program) and is_warm():
                self._process = self._forked(log.fileno())
            else:
                self._process = self._started(endpoint.program, log.fileno())
        self._groups.append(self._process.pid)  # all that comes of it stays in its group
        assert self._process.stdin is not None
        note = {**endpoint.as_table(), "folder": os.getcwd(), "lifeline": self._lifeline}
        try:
            self._process.stdin.write(json.dumps(note).encode() + b"\n")  # not seen by `ps`
        except BrokenPipeError:
            pass  # it has ended already; `ended` says so
        if not self._lifeline:
            self._process.stdin.close()

    def _forked(self, log: int) -> ForkedProgram:
        """The fork server as a fork of this process, which has imported all that it needs."""
        from instep.launch import fork_server

        def serve() -> None:
            os.environ.update(settings())
            fork_server.main()

        try:
            return ForkedProgram(serve, name="instep-host", output=log, errors=log)
        except OSError as error:
            raise _no_room(error) from None

    def _started(self, program: str, log: int) -> subprocess.Popen[bytes]:
        """The fork server, or another program, as a fresh interpreter."""
        module = program or "instep.launch.fork_server"
        command = [*self._before, sys.executable, "-P", "-m", module]
        try:
            return start_with_retries(
                command,
                stdin=subprocess.PIPE,
                bufsize=0,  # else what an ended process did not take is sent again at `close`
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **settings()},
            )
        except OSError as error:
            if not self._before:
                raise _no_room(error) from None
            raise RunError(
                f"{command[0]!r} cannot be run: {error.strerror}. launch.hosts has commands "
                "of this machine that run another command on a host."
            ) from None

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the fork server that was started last, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def end_if_stopped(self, host: int = 0) -> None:
        """Kill the fork server that was started last, if it was stopped."""
        if self._process is not None and is_stopped(self._process.pid):
            self._process.kill()

    def ask_to_stop(self) -> None:
        """Have the fork server kill its workers and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(END)

    def kill(self) -> None:
        """End at once all that comes of the fork server that was started last."""
        for group in self._groups[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def stop(self) -> None:
        """Ask, and wait; SIGKILL ends what is left."""
        process = self._process
        if process is None:
            return
        self.ask_to_stop()
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_S)
        for group in self._groups:
            end_group(group, TIMEOUT_S)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._process = None


def _no_room(error: OSError) -> RunError:
    return RunError(
        f"the fork server could not be started: {error.strerror}. End other processes of this "
        "machine, or raise its limits."
    )
