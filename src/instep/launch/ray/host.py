"""What runs on a node of a Ray cluster: the actor that has a host's fork server."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from instep.comm.protocol.endpoint import Endpoint
from instep.launch.local import LocalLauncher
from instep.launch.node import Needs, enter
from instep.launch.ray.metrics import export
from instep.system.environment import END, RECIPE
from instep.system.processes import Watched, die_with_parent, is_stopped, stat_fields

LOOK_S = 0.05
"""Seconds between two looks at the fork server."""

LAST_S = 1.0
"""How long the dashboard may take to be told of the end."""


@dataclass(frozen=True)
class Place:
    """Where an actor is, and what its node lacks."""

    node: str
    pid: int
    began: str
    """When the process did; with its pid it names no other process."""
    missing: str

    @property
    def is_there(self) -> bool:
        """Whether its process is on this machine, and has not ended."""
        state = stat_fields(self.pid)[:1]
        return began(self.pid) == self.began and state != ["Z"]


class Host:
    """Has one fork server, which ends with it; and ends with the raylet that started it."""

    def __init__(self) -> None:
        self._local = LocalLauncher(lifeline=True)
        self._lock = threading.Lock()  # each call has a thread of its own
        self._serves, self._over = False, threading.Event()
        self._exports: threading.Thread | None = None
        self._copy = os.getcwd()  # of the driver's `working_dir`, if it has one
        # Ray looks for orphans of pid 1 only, and there may be another process that adopts them
        raylet = os.getppid()
        if _is_of_main_thread(raylet):
            die_with_parent(signal.SIGKILL)  # a thread has to wait for the interpreter
        watch = Watched(raylet), self._local
        threading.Thread(target=_end_with, args=watch, daemon=True).start()

    def place(self, needs: Needs) -> Place:
        """Where this is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        missing = needs.in_copy(self._copy).missing()
        return Place(node, os.getpid(), began(os.getpid()), missing)

    def serve(self, endpoint: Endpoint, logs: Path, run_id: str, needs: Needs) -> int | str:
        """Run a fork server to its end; its exit code, or what is missing for it."""
        here = needs.in_copy(self._copy)
        if missing := enter(here, logs, run_id):
            return missing
        if here.recipe != needs.recipe:
            os.environ[RECIPE] = here.recipe
        with self._lock:
            self._local.start(endpoint, logs)
            self._serves = True
        if endpoint.host == 0 and self._exports is None:
            arguments = logs.parent, self._over
            self._exports = threading.Thread(target=export, args=arguments, daemon=True)
            self._exports.start()
        code = None
        while code is None:
            time.sleep(LOOK_S)
            with self._lock:
                code = self._local.ended() if self._serves else -END
        return code

    def stop(self) -> None:
        """End the fork server and all that it has started."""
        self._over.set()
        with self._lock:
            self._serves = False
            self._local.stop()
        if self._exports is not None:
            self._exports.join(LAST_S)


def _is_of_main_thread(parent: int) -> bool:
    """Whether the main thread of its parent has started this process: others may end before."""
    with suppress(OSError):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return str(os.getpid()) in children.split()
    return False


def _end_with(process: Watched, local: LocalLauncher) -> None:
    while not process.wait(LOOK_S):
        pass
    local.kill()
    os._exit(1)


def kill_if_stopped(place: Place) -> None:
    """On an actor's node: kill the actor or its fork server, whichever was stopped."""
    import psutil

    if not place.is_there:
        return
    with suppress(psutil.Error):
        for process in [*psutil.Process(place.pid).children(), psutil.Process(place.pid)]:
            if is_stopped(process.pid):
                process.kill()


def began(pid: int) -> str:
    """When a process of this machine did; empty if there is none."""
    return "".join(stat_fields(pid)[19:20])
