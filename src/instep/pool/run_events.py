"""The events and steps of a run that goes on, read as they come.

Ways in: `RunEvents`, `RunPace`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from instep.events import STEPS, NewEvents
from instep.plain_file import plain
from instep.pool.paces.curve import Paces, curve_of, with_pace

LOOK_S = 1.0
"""The steps of a run are read so often."""

MEASURED_S = 2.0
"""Least time over which the speed of a run is measured."""

_LAST = 64
"""Records of steps that are read: one for each worker."""


class RunEvents:
    """The events of one run that a scheduler follows, read as they come.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._new = NewEvents(run)
        self._pids: dict[int, int] = {}  # of each worker
        self.steps: int | None = None
        """Steps of the whole run; None before a worker has said so."""
        self.stop_requested = self.on_gpus = False
        self.hosts: set[int] = set()
        """Numbers of the hosts that the run has."""
        self.begun = False
        """Whether its workers have begun to train, this time."""

    @property
    def workers(self) -> int:
        """Processes of workers that have not ended."""
        return len(self._pids)

    def update(self) -> None:
        """Read what is new."""
        for event in self._new.read():
            with suppress(LookupError, TypeError, ValueError):  # damaged: the run will say so
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "run_started":
            self._pids.clear()
            self.hosts.clear()
            self.stop_requested = self.begun = False
        elif name == "host_joined":
            self.hosts.add(int(event["host"]))
        elif name in ("host_lost", "host_given_back"):
            self.hosts.discard(int(event["host"]))
        elif name == "generation_started":
            self.begun = True
        elif name == "worker_joined" and event.get("role") != "server":
            self._pids[int(event["worker"])] = int(event["pid"])
        elif name == "process_ended":
            self._pids = {n: pid for n, pid in self._pids.items() if pid != event.get("pid")}
        elif name == "worker_ready":
            self.steps = event.get("last_step") or self.steps
            self.on_gpus = str(event.get("device")).startswith("cuda")
        elif name == "stop_requested":
            self.stop_requested = True


class RunPace:
    """How fast a run goes, by the moments at which its steps began.

    Args:
        run: its folder.
        paces: seconds of a step with so many workers, as they are known.
    """

    def __init__(self, run: Path, paces: Paces) -> None:
        self._run, self.paces = run, paces
        self.step = 0
        self.first: float | None = None
        """When its first step began."""
        self.last: float | None = None
        """When its last one did."""
        self._since: tuple[float, int, int] | None = None  # time, step, workers
        self._looked = 0.0

    def update(self, workers: int, *, at_once: bool = False) -> None:
        """Read how far it is; not if that was done just now, unless it has to be `at_once`."""
        now = time.monotonic()
        if now - self._looked < LOOK_S and not at_once:
            return
        self._looked = now
        found = _steps(self._run / "steps.bin")
        if found is None:
            return
        self.first, began, step = found
        moved = step != self.step
        self.step, self.last = step, began
        since = self._since
        if since is None or since[2] != workers or step < since[1]:
            if moved:  # the step in which it changed is not counted
                self._since = began, step, workers
            return
        seconds, steps = began - since[0], step - since[1]
        if moved and seconds >= MEASURED_S and workers:
            self.paces = with_pace(self.paces, workers, seconds / steps)

    @property
    def pace(self) -> tuple[int, float] | None:
        """Seconds of a step with the workers that it has."""
        workers = self._since[2] if self._since else 0
        return next(((n, step_s) for n, step_s in self.paces if n == workers), None)

    def left_s(self, steps: int | None) -> float | None:
        """Seconds of one worker that are left."""
        if steps is None or not self.paces:
            return None
        return max(0, steps - self.step) * curve_of(self.paces).one_s


def _steps(path: Path) -> tuple[float, float, int] | None:
    """When the first and the last step of a run began, and the number of the last; None if it has
    made none."""
    with suppress(OSError), open(path, "rb", opener=plain) as file:
        size = STEPS.itemsize
        records = file.seek(0, os.SEEK_END) // size
        file.seek(0)
        first = np.frombuffer(file.read(size * min(records, 1)), STEPS)
        file.seek(max(0, records - _LAST) * size)
        last = np.frombuffer(file.read(min(records, _LAST) * size), STEPS)
        if len(last):
            step = int(last["step"].max())
            began = last["begin"][last["step"] == step].min()
            return float(first["begin"][0]), float(began), step
    return None
