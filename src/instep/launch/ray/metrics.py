"""Gauges of a run for Ray's dashboard: its step, loss, samples per second, and workers.

The actor of the first host exports them, and the run's events (`ray_events.py`); Ray brings them to
Prometheus, if it has a dashboard.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from instep.events import STEPS
from instep.launch.ray.events import Events
from instep.launch.ray.private import events_folder
from instep.store.run_files import Records, step_ends

SHOW_S = 2.0
"""Seconds between two looks at the run."""

NEWEST = 1000
"""Records that a look reads."""

LATELY_S = 5.0
"""Over how long samples per second are measured, and a worker counts."""

GAUGES = {
    "step": "The newest step that was committed.",
    "loss": "Its mean loss.",
    "samples_per_second": "Of all workers together, over the last seconds.",
    "workers": "How many have taken a step in the last seconds.",
}


def export(run: Path, over: threading.Event) -> None:
    """Have Ray know how a run is, until it is over."""
    import ray
    from ray.util.metrics import Gauge

    gauges = {name: Gauge(f"instep_{name}", text, ("run",)) for name, text in GAUGES.items()}
    folder = events_folder(ray)
    events = Events(run, folder) if folder is not None else None
    ended = False
    while not ended:
        ended = over.wait(SHOW_S)
        if events is not None:
            events.show()
        for name, value in figures(_newest(run / "steps.bin")).items():
            gauges[name].set(value, {"run": run.name})


def figures(steps: Records) -> dict[str, float]:
    """The value of each gauge; none without records.

    Args:
        steps: [records] of `events.STEPS`, the newest of a run.
    """
    if not len(steps):
        return {}
    ends = step_ends(steps)
    late = steps[ends > ends.max() - LATELY_S]
    newest = steps[steps["step"].argmax()]
    return {
        "step": float(newest["step"]),
        "loss": float(newest["loss"]),
        "samples_per_second": float(late["samples"].sum() / (ends.max() - late["begin"].min())),
        "workers": float(len(np.unique(late["worker"]))),
    }


def _newest(file: Path) -> Records:
    with suppress(OSError):
        count = file.stat().st_size // STEPS.itemsize
        first = max(0, count - NEWEST)
        return np.fromfile(file, STEPS, count - first, offset=first * STEPS.itemsize)
    return np.empty(0, STEPS)
