"""Every process of a run on one timeline, as a Chrome JSON trace.

Open the file in Perfetto (ui.perfetto.dev) or chrome://tracing. Process 0 is
the master, whose events are instants; process `worker + 1` is a worker, whose
steps are spans with their parts nested inside. All times are microseconds
since the run started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from instep.plain_file import write_plain
from instep.state.files.room import check_room
from instep.store.run_files import PARTS, Records
from instep.store.run_folder import RunFolder
from instep.words import member

_ORIGIN_FIELDS = ("time", "event")


def write_trace(folder: RunFolder, path: Path) -> None:
    """Write the trace of a run; at most `report.trace_steps` steps of each worker.

    Where there are more, the first half and the last half of them are drawn.

    Raises:
        OSError: it cannot be written, or would leave less on the disk than a checkpoint does.
    """
    limit = folder.spec.report.trace_steps
    origin_s = folder.times.sessions[0][0] if folder.times.sessions else 0.0
    events = [*_process(0, "master"), *_instants(folder, origin_s)]
    for worker in folder.members.numbers:
        events += _process(worker + 1, member(worker, folder.members.servers))
        events += _spans(_ends(folder.steps_of(worker), limit), worker + 1, origin_s)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    check_room(path.parent, len(text))
    write_plain(path, text)


def _process(pid: int, name: str) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": pid, "tid": 0}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def _instants(folder: RunFolder, origin_s: float) -> Iterator[dict[str, Any]]:
    for event in sorted(folder.events, key=lambda each: float(each["time"])):
        fields = {k: _plain(v) for k, v in event.items() if k not in _ORIGIN_FIELDS}
        yield {
            "ph": "i",
            "s": "p",
            "pid": 0,
            "tid": 0,
            "ts": max(0, round((event["time"] - origin_s) * 1e6)),
            "name": event["event"],
            "args": fields,
        }


def _plain(value: Any) -> Any:
    """Viewers accept text and whole numbers as arguments; JSON has no NaN."""
    return value if isinstance(value, (int, str)) else str(value)


def _ends(steps: Records, limit: int) -> Records:
    if len(steps) <= limit:
        return steps
    head = limit - limit // 2
    return np.concatenate([steps[:head], steps[len(steps) - limit // 2 :]])


def _spans(steps: Records, pid: int, origin_s: float) -> Iterator[dict[str, Any]]:
    edges = _edges(steps, origin_s)
    for record, edge in zip(steps, edges, strict=True):
        common = {"ph": "X", "pid": pid, "tid": 0}
        yield {
            **common,
            "name": f"step {record['step']}",
            "ts": int(edge[0]),
            "dur": int(edge[-1] - edge[0]),
            "args": {"samples": int(record["samples"]), "loss": str(record["loss"])},
        }
        for part, begin, end in zip(PARTS, edge, edge[1:], strict=False):
            if end > begin:
                yield {**common, "name": part, "ts": int(begin), "dur": int(end - begin)}


def _edges(steps: Records, origin_s: float) -> np.ndarray[Any, Any]:
    """Where each part begins and ends, [steps, parts + 1], whole microseconds.

    A clock that was set back, or a sum that rounding made too long, must not
    make two steps overlap: a viewer would nest one inside the other.
    """
    begins = np.maximum.accumulate(steps["begin"] - origin_s) if len(steps) else steps["begin"]
    parts = np.stack([steps[f"{part}_s"].astype(np.float64) for part in PARTS], axis=1)
    offsets = np.cumsum(np.pad(parts, ((0, 0), (1, 0))), axis=1)
    edges = np.rint((begins[:, None] + offsets) * 1e6).astype(np.int64)
    following = np.append(edges[1:, 0], np.iinfo(np.int64).max)[: len(edges)]
    clear: np.ndarray[Any, Any] = np.minimum(edges, following[:, None])
    return clear
