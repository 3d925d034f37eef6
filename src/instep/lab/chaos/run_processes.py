"""Which processes a run has now, by role, and how to signal exactly one of them.

The run's log says which process joined under which pid. That pid may belong to another
process by now, so before a signal is sent the process is held (by a pidfd, on Linux) and
checked: it must have started before the log named it, on this machine, and be a program
of instep. Way in: `Processes`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from instep.events import NewEvents
from instep.store.run_folder import RunFolder
from instep.system.processes import SPARE, Watched, start_time

_SLACK_S = 0.05
"""The kernel counts the start of a process in hundredths of a second."""

_JOINED = {"worker_joined": "worker", "master_started": "master", "host_joined": "host"}


class Known(NamedTuple):
    """A process of the run, as last logged or seen."""

    role: str
    number: int
    """Of the worker or the host; for a loader process or a spare, of the one it belongs to."""
    pid: int
    seen: float
    """Unix seconds at which the pid certainly was this process's."""
    parent: int = 0
    """The pid that its parent must have; 0 if any will do."""


class Processes:
    """The processes of one run, from its log as far as it is written.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._new = NewEvents(run)
        self._known: dict[tuple[str, int], Known] = {}

    def update(self) -> None:
        """Read what has been logged since the last call."""
        for event in self._new.read():
            with contextlib.suppress(LookupError, TypeError, ValueError):  # damaged: no process
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "run_started":
            self._known.clear()
        elif event["event"] == "process_ended":
            pid = event.get("pid")
            self._known = {key: each for key, each in self._known.items() if each.pid != pid}
        elif (role := _role_of(event)) and event.get("pid"):
            number = int(event.get("worker", event.get("host", 0)) or 0)
            self._known[role, number] = Known(role, number, int(event["pid"]), event["time"])

    def of(self, role: str) -> list[Known]:
        """The processes of one role that seem to live, by number."""
        if role == "loader":
            workers = self.of("worker")
            return [child for each in workers for child in _forks_of(each, role, theirs=True)]
        if role == "spare":
            forks = [child for host in self.of("host") for child in _forks_of(host, role)]
            return [child for child in forks if _name_of(child.pid) == SPARE]
        return [each for key, each in sorted(self._known.items()) if key[0] == role]

    def alive(self) -> list[int]:
        """Pids of the processes that certainly live."""
        roles = (*_JOINED.values(), "server", "loader", "spare")
        return [each.pid for role in roles for each in self.of(role) if _is(each)]


def _role_of(event: dict[str, Any]) -> str:
    """The role of the process that an event says has joined; empty for other events."""
    role = _JOINED.get(event["event"], "")
    return str(event.get("role") or role) if role else ""


def roles_of(run: RunFolder) -> list[str]:
    """The roles that a run has processes of; `loader` if the job asks for them or one was seen."""
    there = [_role_of(event) for event in run.events if event.get("pid")]
    roles = [role for role in (*_JOINED.values(), "server") if role in there]
    asked = run.spec.data.loaders
    if (isinstance(asked, int) and asked) or any(run.named("loaders_started")):
        roles.append("loader")
    if "host" in roles and sys.platform == "linux":
        roles.append("spare")
    return roles


def _forks_of(known: Known, role: str, *, theirs: bool = False) -> Iterator[Known]:
    """Forks of a process, and also their forks if asked; other programs it started are left out."""
    with contextlib.suppress(psutil.Error):
        if not _is(known):
            return
        parent = psutil.Process(known.pid)
        for child in sorted(parent.children(recursive=theirs), key=lambda each: each.pid):
            with contextlib.suppress(psutil.Error):
                if child.cmdline() == parent.cmdline():
                    yield Known(role, known.number, child.pid, time.time(), child.ppid())


def _name_of(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).name())
    return ""


def send(known: Known, number: signal.Signals) -> bool:
    """Signal this process and no other; False if it has ended."""
    held = Watched(known.pid)  # from here on its pid cannot become another's unnoticed
    try:
        there = _is(known)
        if there:
            held.signal(number)
        return there
    finally:
        held.close()


def _is(known: Known) -> bool:
    """Whether the process that is meant lives under this pid."""
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
