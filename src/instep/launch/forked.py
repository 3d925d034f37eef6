"""A fork server that is a fork of this process, for a recipe that only this process has.

Accelerate and Lightning fork from a notebook's kernel in the same way. A fork keeps one thread, so
what waits for another one in it waits for ever: a pool of torch's threads above all. So workers of
such a run compute on one thread each; and once CUDA has started here there is no fork at all.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import RecipeError, RunError, SpecError
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.local import TIMEOUT_S
from instep.plain_file import plain
from instep.store.folder import host_log
from instep.system.environment import END, FORKED, SETTINGS
from instep.system.forks import cuda_survives_a_fork
from instep.system.processes import end_group, is_stopped, wait_for_child


class ForkedLauncher:
    """Starts the fork server of this machine as a fork of this process."""

    def __init__(self) -> None:
        self._pid = 0
        self._code: int | None = None
        self._groups: list[int] = []

    @classmethod
    def of(cls, job: JobSpec) -> ForkedLauncher:
        """For a job of this machine.

        Raises:
            SpecError: it is to run elsewhere, or on several threads.
            RecipeError: CUDA has started.
        """
        if job.launch.launcher != "local":
            raise SpecError(
                f"launch.on = {job.launch.launcher!r}: the recipe has no file, so only forks of "
                "this process have it. Write it into a .py file, and import it from there."
            )
        if job.train.threads not in (0, 1):
            raise SpecError(
                f"train.threads = {job.train.threads}: the workers are forked from this process, "
                "where more than one thread can hang. Leave it out, or write the recipe into a .py "
                "file."
            )
        if not cuda_survives_a_fork():
            raise RecipeError(
                "CUDA has started in this process, so workers forked from it cannot use it. "
                "Restart the kernel, import instep first, and call instep.train before anything "
                "uses a GPU; or write the recipe into a .py file, and import it from there."
            )
        return cls()

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """As it is: there is one host, and it is here."""
        return launch

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Fork it, into a session of its own, so that Ctrl-C reaches only us.

        Raises:
            RunError: the system has no room for a process.
        """
        note = json.dumps({**endpoint.as_table(), "folder": os.getcwd(), "lifeline": False})
        log = host_log(logs, endpoint.host)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._pid, self._code = os.fork(), None
        except OSError as error:
            raise RunError(
                f"the fork server could not be forked: {error.strerror}. End other processes of "
                "this machine, or raise its limits."
            ) from None
        if not self._pid:
            _serve(note, log)
        self._groups.append(self._pid)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the fork server that was started last, or None while it runs."""
        if self._code is None:
            self._code = wait_for_child(self._pid, 0.0)
        return self._code

    def end_if_stopped(self, host: int = 0) -> None:
        """Kill the fork server that was started last, if it was stopped."""
        if self.ended() is None and is_stopped(self._pid):
            os.kill(self._pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask, and wait; SIGKILL ends what is left."""
        if not self._pid:
            return
        if self.ended() is None:
            os.kill(self._pid, END)
            self._code = wait_for_child(self._pid, TIMEOUT_S)
        for group in self._groups:
            end_group(group, TIMEOUT_S)
        if self._code is None:
            self._code = wait_for_child(self._pid, TIMEOUT_S)
        self._pid = 0


def _close_sockets() -> None:
    """Close our ends of the connections of the process before; a recipe's open files stay."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def _serve(note: str, log: Path) -> NoReturn:
    """In the fork: leave behind what belongs to the process before, and be a fork server."""
    code = 1
    try:
        gc.freeze()  # nothing of it is ever closed here: its sockets are the other process's too
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        output = plain(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        _close_sockets()
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False, buffering=1)
            for number, mode in enumerate(("r", "w", "w"))
        )
        os.environ.update(SETTINGS)
        os.environ[FORKED] = "1"
        from instep.launch.fork_server import serve

        serve(note)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
