"""The clients of trials: each a process of its own, which the search may outlive or be outlived by.

A client is `instep run` or `instep resume`, detached. Way in: `Clients`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep import detached
from instep.detached.warm import WarmStarts
from instep.search.results import name_of


class Clients:
    """The clients of the trials of one search.

    Args:
        folder: of the search.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: dict[int, subprocess.Popen[bytes]] = {}
        self._warm: WarmStarts | None = None

    @contextmanager
    def warm(self) -> Iterator[None]:
        """Keep a process warm for further starts, for as long as the context lasts."""
        self._warm = WarmStarts()
        try:
            yield
        finally:
            self._warm.close()
            self._warm = None

    def look(self) -> None:
        """Look after the process that is kept warm."""
        if self._warm is not None:
            self._warm.look()

    def start(self, number: int, workers: int) -> None:
        """Begin the run of a trial, or continue it; unless a client of an earlier search lives."""
        name = name_of(number)
        run = self._folder / name
        words = ["run", str(job_file(self._folder, number)), "--runs", str(self._folder)]
        words += ["--name", name]
        if (run / "job.toml").is_file():
            words = ["resume", str(run)]
        words += ["--workers", str(workers), "--json"]
        start = self._warm.start if self._warm is not None else detached.start
        self._own.pop(number, None)
        process = start(words, self.lock_of(number), log_of(self._folder, number))
        if process is not None:
            self._own[number] = process

    def is_alive(self, number: int) -> bool:
        """Whether a process is at a trial's run: ours, or one of an earlier search."""
        if number in self._own and self._own[number].poll() is None:
            return True
        return detached.lives(self.lock_of(number))

    def exit_code(self, number: int) -> int | None:
        """The exit code of the client, if that is known."""
        if number in self._own:
            return self._own[number].poll()
        return detached.exit_code(self.lock_of(number))

    def interrupt(self, number: int) -> None:
        """Ask a run to stop at its next step, and save."""
        detached.interrupt_it(self.lock_of(number))

    def lock_of(self, number: int) -> Path:
        """The file that the client of a trial has locked."""
        return self._folder / "jobs" / f"{name_of(number)}.lock"


def job_file(folder: Path, number: int) -> Path:
    """The job of a trial: an ordinary one."""
    return folder / "jobs" / f"{name_of(number)}.toml"


def log_of(folder: Path, number: int) -> Path:
    """The output of the client of a trial."""
    return folder / "jobs" / f"{name_of(number)}.log"
