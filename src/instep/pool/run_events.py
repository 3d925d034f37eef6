"""The events and steps of a run that goes on, read as they come.

Ways in: `RunEvents`, `RunPace`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.checksums import table_of
from instep.errors import InstepError
from instep.events import LEDGER, read_records
from instep.plain_file import plain
from instep.pool.policy import speed

LOOK_S = 1.0
"""The steps of a run are read so often."""

MEASURED_S = 2.0
"""Least time over which the speed of a run is measured."""


class RunEvents:
    """The events of one run that a scheduler follows, read as they come.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._path, self._read, self._rest = run / "events.jsonl", 0, b""
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
        try:
            with open(self._path, "rb", opener=plain) as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError, LookupError, TypeError):  # damaged: the run will say so
                self._take(table_of(line))

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
    """How fast a run goes with the workers that it has."""

    def __init__(self) -> None:
        self.step = 0
        self._since: tuple[float, int, int] | None = None  # time, step, workers
        self._looked = 0.0
        self.step_s: float | None = None
        """Seconds of a step with one worker."""

    def update(self, run: Path, workers: int) -> None:
        """Read how far it is."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        with suppress(OSError, InstepError):
            self.step = int(read_records(run / "ledger.bin", LEDGER)["step"][-64:].max(initial=0))
        if self._since is None or self._since[2] != workers or self.step < self._since[1]:
            self._since = now, self.step, workers
            return
        seconds, steps = now - self._since[0], self.step - self._since[1]
        if seconds >= MEASURED_S and steps > 0 and workers:
            self.step_s = seconds / steps * speed(workers)

    def left_s(self, steps: int | None) -> float | None:
        """Seconds of one worker that are left."""
        if steps is None or self.step_s is None:
            return None
        return max(0, steps - self.step) * self.step_s
