"""Which processes a run has now, by role, and how to signal one of them and nobody else.

What a run logs says who has come and under which pid. A pid may be another's
by now, so before anything is sent the process is held (a pidfd, where the system
has them) and looked at: it must have begun before the log named it, on this
machine, and be a program of instep. Way in: `Roster`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from instep.plain_file import plain
from instep.store.run_folder import RunFolder
from instep.system.processes import SPARE, start_time

_SLACK_S = 0.05
"""The kernel counts the start of a process in hundredths of a second."""

_CAME = {"worker_joined": "worker", "master_started": "master", "host_joined": "host"}


class Known(NamedTuple):
    """A process of the run, as it was last heard of."""

    role: str
    number: int
    """Of the worker or the host; of the one whose it is, for a loader process or a spare."""
    pid: int
    seen: float
    """Unix seconds at which it certainly was that process."""
    parent: int = 0
    """Whose child it must be; 0 if that is all the same."""


class Roster:
    """The processes of one run, from its log as far as it is written.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._path, self._read, self._rest = run / "events.jsonl", 0, b""
        self._known: dict[tuple[str, int], Known] = {}

    def listen(self) -> None:
        """Take in what has been logged since."""
        try:
            with open(self._path, "rb", opener=plain) as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, LookupError, TypeError):  # damaged: no process
                self.hear(json.loads(line))

    def hear(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        if event["event"] == "run_started":
            self._known.clear()
        elif event["event"] == "process_ended":
            gone = [key for key, each in self._known.items() if each.pid == event.get("pid")]
            for key in gone:
                del self._known[key]
        elif (role := _CAME.get(event["event"])) and event.get("pid"):
            number = int(event.get("worker", event.get("host", 0)) or 0)
            self._known[role, number] = Known(role, number, int(event["pid"]), event["time"])

    def of(self, role: str) -> list[Known]:
        """Those of one role that are believed to live, by number."""
        if role == "loader":
            workers = self.of("worker")
            return [child for each in workers for child in _forks_of(each, role, theirs=True)]
        if role == "spare":
            forks = [child for host in self.of("host") for child in _forks_of(host, role)]
            return [child for child in forks if _name_of(child.pid) == SPARE]
        return [each for key, each in sorted(self._known.items()) if key[0] == role]

    def alive(self) -> list[int]:
        """Pids of those that certainly live."""
        roles = (*_CAME.values(), "loader", "spare")
        with_children = [each for role in roles for each in self.of(role)]
        return [each.pid for each in with_children if _is(each)]


def roles_of(run: RunFolder) -> list[str]:
    """The roles that a run has processes of; a loader where one was asked for, or has been seen."""
    roles = [role for event, role in _CAME.items() if any(e.get("pid") for e in run.named(event))]
    asked = run.spec.data.loaders
    some = (isinstance(asked, int) and asked) or any(run.named("loaders_started"))
    loader = ["loader"] if some else []
    spare = ["spare"] if "host" in roles and sys.platform == "linux" else []
    return [*roles, *loader, *spare]


def _forks_of(known: Known, role: str, *, theirs: bool = False) -> Iterator[Known]:
    """Forks of a process, and also theirs if asked; what else it started is left alone."""
    with contextlib.suppress(psutil.Error):
        if not _is(known):
            return
        parent = psutil.Process(known.pid)
        for child in sorted(parent.children(recursive=theirs), key=lambda each: each.pid):
            with contextlib.suppress(psutil.Error):
                if child.cmdline() == parent.cmdline():
                    yield Known(role, known.number, child.pid, time.time(), child.ppid())


def _name_of(pid: int) -> str:
    """What a process calls itself."""
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).name())
    return ""


def send(known: Known, number: signal.Signals) -> bool:
    """Signal this process and no other; False if it is not there any more."""
    try:
        held = os.pidfd_open(known.pid)  # from here on the pid cannot become another's unnoticed
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # no pidfds here
        return _is(known) and _kill(known.pid, number)
    try:
        if not _is(known):
            return False
        signal.pidfd_send_signal(held, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(held)


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _is(known: Known) -> bool:
    """Whether under this pid there lives the process that was meant."""
    try:
        process = psutil.Process(known.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if known.parent and process.ppid() != known.parent:
            return False
        if not any("instep" in word for word in process.cmdline()):
            return False
        since: float = start_time(known.pid) or process.create_time()
    except psutil.Error:
        return False
    return since <= known.seen + _SLACK_S
