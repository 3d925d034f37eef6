"""Events of a run for Ray's dashboard (Overview, Events) and `ray list cluster-events`.

Ray reads them from a file of the node, if it has a dashboard. An event has the same id whoever
writes it, so that another actor, which begins anew, doubles none.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.events import NewEvents
from instep.report.terminal.screen import notice

SHOWN = {
    "run_started",
    "host_joined",
    "host_lost",
    "host_given_back",
    "worker_joined",
    "worker_lost",
    "worker_ready",
    "checkpoint_saved",
    "validated",
    "run_finished",
}
"""Beside those of which a terminal tells in a line of its own (`notice`)."""

SEVERE = {
    "warning": "WARNING",
    "host_lost": "WARNING",
    "worker_lost": "WARNING",
    "worker_hung": "WARNING",
    "went_back": "WARNING",
    "worker_failed": "ERROR",
    "corruption_found": "ERROR",
}
"""How severe they are; others are `INFO`."""


class Events:
    """Shows the events of a run, each once.

    Args:
        run: its folder.
        folder: where the node's Ray looks for events.
    """

    def __init__(self, run: Path, folder: Path) -> None:
        self._run, self._new_events, self._seen = run, NewEvents(run), 0
        self._generations, self._servers = 0, set[int]()
        folder.mkdir(exist_ok=True)
        self._file = folder / f"event_JOBS_instep_{os.getpid()}.log"  # JOBS: one of Ray's sources

    def show(self) -> None:
        """Those that have come since the last call."""
        lines = list(self._new())
        if lines:
            with self._file.open("a") as file:
                file.writelines(lines)

    def _new(self) -> Iterator[str]:
        for event in self._new_events.read():
            place, self._seen = self._seen, self._seen + 1
            self._generations += event["event"] == "generation_started"
            if event.get("role") == "server":
                self._servers.add(event["worker"])
            text = notice(event, generations=self._generations, servers=self._servers)
            if text or event["event"] in SHOWN:
                yield json.dumps(_as_ray_has_it(self._run.name, place, event, text)) + "\n"


def _as_ray_has_it(run: str, place: int, event: dict[str, Any], text: str | None) -> Any:
    """An event in the format of Ray's `event.proto`."""
    what = event["event"]
    fields = {k: v for k, v in event.items() if isinstance(v, (str, int, float))}
    told = [f"{name} {value}" for name, value in fields.items() if name not in ("time", "event")]
    text = text or f"{what.replace('_', ' ')}: {', '.join(told)}"
    return {
        "event_id": f"instep-{run}-{place}",
        "source_type": "JOBS",
        "source_hostname": platform.node(),
        "source_pid": os.getpid(),
        "severity": SEVERE.get(what, "INFO"),
        "label": what,
        "message": f"instep {run}: {text}",
        "timestamp": str(int(event["time"])),
        "custom_fields": {"run": run, **{k: str(v) for k, v in fields.items()}},
    }
