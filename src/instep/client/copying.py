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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

from instep.client.following import logged
from instep.comm.protocol.messages import Emit
from instep.errors import DataError, RunError, SpecError
from instep.job.spec import JobSpec
from instep.plain_file import plain
from instep.store.copies.follow import END_S, NOTES
from instep.store.copies.restore import is_copies, restore, runs_called
from instep.system.processes import is_stopped
from instep.words import command, shown_url

AGAIN_S = 5.0
"""Between two starts of the process."""

SAID_S, QUIETLY_SAID_S = 3.0, 60.0
"""After the run, lines say what it waits for, if it takes longer; the second in a quiet run."""

LOOK_S = 0.2


class Copying:
    """The process, and what it has said. A fault of it, or of its start, is never one of the run.

    Args:
        run: the folder.
        quiet: whether only warnings are printed.
    """

    def __init__(self, run: Path, quiet: bool) -> None:
        self._run, self._quiet = run, quiet
        self._process: subprocess.Popen[bytes] | None = None
        self._notes = self._running = -1  # what it says; open for as long as the run lasts
        self._last: dict[str, Any] = {}
        self._unstarted = ""  # why it cannot be started
        self._unsaid: list[Emit] = []
        self._start()

    def _start(self) -> None:
        """Start the process, or say once that it cannot be started."""
        self._close()
        self._started, self._rest = time.monotonic(), b""
        log = self._run / "logs" / "copies.log"
        try:
            log.parent.mkdir(exist_ok=True)
            with open(log, "ab", opener=plain) as errors, ExitStack() as ends:
                told, self._running = os.pipe()
                given = ends.enter_context(open(told))
                self._notes, tells = os.pipe()
                out = ends.enter_context(open(tells, "w"))
                os.set_blocking(self._notes, False)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "instep.store.copies.follow", self._run],
                    stdin=given,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C reaches only us
                )
        except OSError as error:  # the system is short of processes, memory or descriptors
            self._close()
            self._process, before = None, self._unstarted
            self._unstarted = f"the process that copies checkpoints cannot be started: {error}"
            text = f"{self._unstarted}. Training goes on, and it is tried again."
            if not before:
                self._unsaid = [Emit(name="warning", fields={"text": text})]
        else:
            self._unstarted = ""

    def _close(self) -> None:
        for descriptor in (self._notes, self._running):
            if descriptor >= 0:
                os.close(descriptor)
        self._notes = self._running = -1

    def events(self) -> list[Emit]:
        """Gives what it has said since the last call, for the run's log; never waits."""
        ended = self._process is None or self._process.poll() is not None
        said = self._read()
        if ended and time.monotonic() - self._started > AGAIN_S:
            self._start()
        unsaid, self._unsaid = self._unsaid, []
        return said + unsaid

    def _read(self) -> list[Emit]:
        if self._notes < 0:
            return []
        with suppress(BlockingIOError):
            while data := os.read(self._notes, 1 << 16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        notes = [json.loads(line) for line in lines]
        for note in notes:
            if note["name"] != "warning":
                self._last |= {note["name"]: note["fields"]}
        return [Emit(**note) for note in notes if note["name"] not in NOTES]

    def _print_warnings(self) -> None:
        """The run has no log any more."""
        for note in self._read():
            if note.name == "warning":
                print(f"instep: warning: {note.fields['text']}", file=sys.stderr)

    def end(self) -> None:
        """Wait until the last checkpoint is copied, or cannot be."""
        if not self._run.exists():
            self._kill()
            self._close()
            return
        try:
            if self._wait() < 0:  # it was killed, or stopped, or is not started
                self._print_warnings()
                self._start()
                self._wait()
        except KeyboardInterrupt:
            self._kill()
        self._print_warnings()
        self._close()
        self._say()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> int:
        """Wait for the process; negative if it did not end by itself, or was not started."""
        if self._process is None:
            return -1
        os.close(self._running)
        self._running = -1
        says_at = time.monotonic() + (QUIETLY_SAID_S if self._quiet else SAID_S)
        said = set[str]()
        while not (stopped := is_stopped(self._process.pid)):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(LOOK_S)
            self._print_warnings()
            doing = self._last.get("copying", {}).get("text", "the copies are being looked at")
            if time.monotonic() > says_at and doing not in said:
                said.add(doing)
                print(
                    f"copies  {doing}. This ends {END_S:g} s after bytes last moved; Ctrl-C ends "
                    "it now",
                    file=sys.stderr,
                )
        self._kill()
        return -1 if stopped else 0

    def _say(self) -> None:
        copied, finished = self._last.get("checkpoint_copied"), self._last.get("finished")
        if finished is None:
            failed = self._unstarted or "the copies were interrupted"
            failed = self._last.get("failed", {}).get("text", failed)
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
    """Copy the newest checkpoint of a run that does not continue, unless it is copied already."""
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
        path = Path(to or Path("runs", place.rstrip("/").rpartition("/")[2]))
        try:
            return restore(place, path, say)
        except DataError as error:
            raise DataError(
                f"{error} See that this machine reaches it and may read it, and give the same "
                "command again."
            ) from None
    if to is not None:
        raise SpecError(
            f"--to {to}: {place!r} is no copy of a run, which would be restored there. Leave --to "
            "out, or name the URL or folder of the copies."
        )
    return Path(run)


def check_not_elsewhere(job: JobSpec, runs: Path) -> None:
    """Refuse to begin a run in place of one that is to be resumed, and of which there are copies.

    Raises:
        RunError: there are; the text says how to restore them.
        DataError: the file system does not answer.
    """
    if not job.checkpoint.copy_to:
        return
    try:
        found = runs_called(job.name, job.checkpoint.copy_to)
    except DataError as error:
        raise DataError(
            f"there is no run {job.name!r} in {runs}, and whether there are copies of one cannot "
            f"be known: {error} For a new run leave resume=True out."
        ) from None
    if found:
        commands = (
            f"instep resume {quote(url)} --to {quote(str(runs / job.name))}"
            for url in map(shown_url, found)
        )
        raise RunError(
            f"there is no run {job.name!r} in {runs}, and there are copies of one. To continue it: "
            f"{' or '.join(commands)}, which restores it, then start the script again. For a new "
            "run leave resume=True out, or give another name."
        )
