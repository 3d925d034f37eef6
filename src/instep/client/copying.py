"""Starts the process that copies a run's checkpoints, passes on what it says, and waits for it.

What it does, `store/copies/follow.py` knows. If it is killed, another one finds what is there. At
the end of the run it finishes the copy of the last checkpoint; Ctrl-C leaves that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

from instep.client.following import logged
from instep.comm.protocol.messages import Emit
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.plain_file import plain
from instep.store.copies.restore import is_copies, restore
from instep.system.processes import is_stopped
from instep.words import command

AGAIN_S = 5.0
"""Between two starts of the process."""

SAID_S = 3.0
"""After the run, a line says what it waits for, if it takes longer."""

LOOK_S = 0.2


class Copying:
    """The process, and what it has said.

    Args:
        run: the folder.
        quiet: whether only warnings are printed.
    """

    def __init__(self, run: Path, quiet: bool) -> None:
        self._run, self._quiet = run, quiet
        self._notes = self._running = -1  # what it says; open for as long as the run goes on
        self._last: dict[str, Any] = {}
        self._start()

    def _start(self) -> None:
        self._close()
        self._started, self._rest = time.monotonic(), b""
        log = self._run / "logs" / "copies.log"
        log.parent.mkdir(exist_ok=True)
        (told, self._running), (self._notes, tells) = os.pipe(), os.pipe()
        os.set_blocking(self._notes, False)
        with open(log, "ab", opener=plain) as errors, open(told) as given, open(tells, "w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "instep.store.copies.follow", self._run],
                stdin=given,
                stdout=out,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only us
            )

    def _close(self) -> None:
        for descriptor in (self._notes, self._running):
            if descriptor >= 0:
                os.close(descriptor)
        self._notes = self._running = -1

    def events(self) -> list[Emit]:
        """Gives what it has said since the last call, for the run's log; never waits."""
        if self._process.poll() is not None and time.monotonic() - self._started > AGAIN_S:
            self._start()
        return self._read()

    def _read(self) -> list[Emit]:
        with suppress(BlockingIOError):
            while data := os.read(self._notes, 1 << 16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        notes = [json.loads(line) for line in lines]
        for note in notes:
            if note["name"] != "warning":
                self._last |= {note["name"]: note["fields"]}
        return [Emit(**note) for note in notes if note["name"] not in ("failed", "finished")]

    def _print_warnings(self) -> None:
        """The run has no log any more."""
        for note in self._read():
            if note.name == "warning":
                print(f"instep: warning: {note.fields['text']}", file=sys.stderr)

    def end(self) -> None:
        """Wait until the last checkpoint is copied, or cannot be."""
        if not self._run.exists():
            self._process.kill()
            self._process.wait()
            self._close()
            return
        try:
            if self._wait() < 0:  # it was killed, or stopped
                self._start()
                self._wait()
        except KeyboardInterrupt:
            self._process.kill()
            self._process.wait()
        self._print_warnings()
        self._close()
        self._say()

    def _wait(self) -> int:
        os.close(self._running)
        self._running = -1
        said = time.monotonic() + SAID_S
        while not (stopped := is_stopped(self._process.pid)):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(LOOK_S)
            self._print_warnings()
            if time.monotonic() > said and not self._quiet:
                said = float("inf")
                print(
                    "copies  the last checkpoint is being copied; Ctrl-C leaves it", file=sys.stderr
                )
        self._process.kill()
        self._process.wait()
        return -1 if stopped else 0

    def _say(self) -> None:
        copied, finished = self._last.get("checkpoint_copied"), self._last.get("finished")
        if finished is None:
            failed = self._last.get("failed", {}).get("text", "the copies were interrupted")
            again = command("resume", self._run)
            print(
                f"instep: warning: {failed}. The run's own checkpoints are complete. See "
                f"{self._run / 'logs' / 'copies.log'}; {again} copies what is missing.",
                file=sys.stderr,
            )
        elif copied is not None and not self._quiet:
            print(
                f"copies  step {copied['step']}  {copied['url']}  to resume from there: "
                f"instep resume {quote(copied['url'])}",
                file=sys.stderr,
            )


@contextmanager
def followed(run: Path, job: JobSpec, quiet: bool) -> Iterator[Callable[[], list[Emit]]]:
    """In this context loggers follow a run, and its checkpoints are copied, as its job wants.

    Yields:
        A function that gives the events that the run's log is to have.
    """
    with logged(run, job), _copied(run, job, quiet) as events:
        yield events


@contextmanager
def _copied(run: Path, job: JobSpec, quiet: bool) -> Iterator[Callable[[], list[Emit]]]:
    if not job.checkpoint.copy_to:
        yield list
        return
    copying = Copying(run, quiet)
    try:
        yield copying.events
    finally:
        copying.end()


def copy_missing(run: Path, job: JobSpec, quiet: bool) -> None:
    """Copy the newest checkpoint of a run that does not go on, unless it is copied already."""
    with _copied(run, job, quiet):
        pass


def folder_of(
    run: str | Path, to: str | Path | None, say: Callable[[str], object] = lambda _: None
) -> Path:
    """The folder of a run that is to be resumed; where its copies are named, it is made of them.

    Args:
        run: the folder, or the URL or folder of the copies of its checkpoints.
        to: where it is restored; by default `runs/NAME`, as the copies are called.
        say: told what was restored.

    Raises:
        InstepError: there is no copy that is whole, or it cannot be restored there.
    """
    place = str(run)
    if is_copies(place):
        return restore(place, Path(to or Path("runs", place.rstrip("/").rpartition("/")[2])), say)
    if to is not None:
        raise SpecError(
            f"--to {to}: {place!r} is no copy of a run, which would be restored there. Leave --to "
            "out, or name the URL or folder of the copies."
        )
    return Path(run)
