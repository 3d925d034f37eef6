"""The clients of trials: each a process of its own, which the search may outlive or be outlived by.

A client is `instep run` or `instep resume` in a session of its own, so that nothing which ends the
search ends it. After that it is found again by the lock of its run folder. Way in: `Clients`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from instep.errors import RunError
from instep.search.record import SearchRecord
from instep.search.results import name_of
from instep.store.folder import is_running
from instep.system.processes import start_time, start_with_retries

_SAME_S = 1.0
"""Two looks at the start of one process differ by less."""


class Clients:
    """The clients of the trials of one search.

    Args:
        folder: of the search.
        record: of it.
    """

    def __init__(self, folder: Path, record: SearchRecord) -> None:
        self._folder, self._record = folder, record
        self._own: dict[int, subprocess.Popen[bytes]] = {}
        self._known: Mapping[int, tuple[int, float]] = record.clients()

    def start(self, number: int, workers: int) -> None:
        """Begin the run of a trial, or continue it."""
        name = name_of(number)
        run = self._folder / name
        words = ["run", str(job_file(self._folder, number)), "--runs", str(self._folder)]
        words += ["--name", name]
        if (run / "job.toml").is_file():
            words = ["resume", str(run)]
        command = [sys.executable, "-m", "instep", *words, "--workers", str(workers), "--json"]
        with open(log_of(self._folder, number), "ab") as log:
            process = start_with_retries(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._own[number] = process
        self._record.started(number, process.pid, start_time(process.pid) or 0.0)

    def is_alive(self, number: int) -> bool:
        """Whether a process is at a trial's run: ours, or one of an earlier search."""
        if number in self._own and self._own[number].poll() is None:
            return True
        with suppress(RunError):  # there is no folder yet
            if is_running(self._folder / name_of(number)):
                return True
        return number not in self._own and self._pid(number) is not None

    def exit_code(self, number: int) -> int | None:
        """How the client ended; None if it was not ours."""
        return self._own[number].poll() if number in self._own else None

    def interrupt(self) -> None:
        """Ask every run to stop at its next step, and save."""
        for number in {*self._own, *self._known}:
            if (pid := self._pid(number)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def _pid(self, number: int) -> int | None:
        """The process that is the client of a trial, as far as it lives."""
        if number in self._own:
            process = self._own[number]
            return process.pid if process.poll() is None else None
        pid, began = self._known.get(number, (0, 0.0))
        found = start_time(pid) if pid else None
        return pid if found is not None and abs(found - began) < _SAME_S else None


def job_file(folder: Path, number: int) -> Path:
    """The job of a trial: an ordinary one."""
    return folder / "jobs" / f"{name_of(number)}.toml"


def log_of(folder: Path, number: int) -> Path:
    """The output of the client of a trial."""
    return folder / "jobs" / f"{name_of(number)}.log"


def last_words(folder: Path, number: int) -> str:
    """The error with which the client of a trial ended; empty if it said none."""
    with suppress(OSError):
        lines = log_of(folder, number).read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("instep: ")]
        return said[-1].removeprefix("instep: ") if said else ""
    return ""
