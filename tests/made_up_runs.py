"""Makes run folders as a real run leaves them: true formats, made-up figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from instep.events import LEDGER, STEPS, ledger_header, read_records
from instep.job.file import build, dump

BEGIN_S = 1_790_000_000.0  # Unix seconds at which every made-up run starts
START_UP_S = 2.5
PHASES = {"launch": 0.2, "import torch": 1.4, "recipe": 0.5, "meet": 0.1, "first batch": 0.3}


def make_run(
    path: Path,
    *,
    workers: int = 2,
    samples: int = 1000,
    global_batch: int = 64,
    epochs: int = 3,
    steps: int | None = None,
    outcome: str | None = "completed",
    metrics: bool = True,
    step_s: float = 0.02,
    train: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    name: str | None = None,
    nan_from: int | None = None,
    mesh: dict[str, int] | None = None,
) -> Path:
    """A folder of a run of `epochs`, or of the first `steps` steps of it; returns `path`.

    1,000 samples in batches of 64 make 16 steps an epoch, the last of 40. The
    loss of step k is 2 / k, and NaN from step `nan_from` on. With a `mesh` of `tensor` or
    `stages`, each replica has what a worker has without.
    """
    (path / "checkpoints").mkdir(parents=True)
    (path / "logs").mkdir()
    job = {
        "name": name or path.name,
        "recipe": "digits.py:recipe",
        "workers": workers,
        "train": {"global_batch": global_batch, **(train or {"epochs": epochs})},
        "report": report or {},
        "mesh": mesh or {},
    }
    (path / "job.toml").write_text(dump(build(job, source="test")))
    epoch_steps = math.ceil(samples / global_batch)
    total = epochs * epoch_steps if steps is None else steps
    ranks = math.prod((mesh or {}).values())
    ledger = make_ledger(workers // ranks, samples, global_batch, total)
    ledger["worker"] *= ranks
    write_ledger(path, ledger)
    steps = [make_steps(ledger, workers, step_s, nan_from) for _ in range(ranks)]
    for rank, each in enumerate(steps):  # along tensor and stages the first of them tells
        each["worker"] += rank
        each["samples"] *= rank == 0
    np.concatenate(steps).tofile(path / "steps.bin")
    events = _opening(workers, samples)
    events += _milestones(epoch_steps, total, step_s, metrics)
    moved_s = START_UP_S + total * step_s
    events += [
        _event(moved_s, "traffic", worker=w, sent_bytes=500_000 + w, received_bytes=9)
        for w in range(workers)
    ]
    if outcome == "failed":
        events.append(failure(total * step_s, total + 1))
    if outcome:
        end_s = START_UP_S + total * step_s + 1.5
        events.append(
            _event(end_s, "run_finished", outcome=outcome, rule=None, step=total, seconds=end_s)
        )
    if outcome == "completed":
        (path / "model.safetensors").write_bytes(b"made up")
    events.sort(key=lambda event: event["time"])
    write_events(path, events)
    return path


def with_servers(path: Path, *servers: int, samples: int = 1000, global_batch: int = 64) -> Path:
    """Of a run that `make_run` made, make the last of its workers servers: they compute nothing."""
    ledger = read_records(path / "ledger.bin", LEDGER)
    workers = int(ledger["worker"].max()) + 1 - len(servers)
    write_ledger(path, make_ledger(workers, samples, global_batch, int(ledger["step"].max())))
    steps = np.fromfile(path / "steps.bin", STEPS)
    mine = np.isin(steps["worker"], servers)
    steps["samples"][mine] = 0
    for part in ("load_s", "forward_s", "backward_s"):
        steps[part][mine] = 0.0
    steps.tofile(path / "steps.bin")
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "worker_joined":
            event["role"] = "server" if event["worker"] in servers else "worker"
    write_events(path, events)
    return path


def write_ledger(path: Path, records: np.ndarray[Any, np.dtype[Any]]) -> None:
    """The ledger of the run in `path`, with these records."""
    (path / "ledger.bin").write_bytes(ledger_header() + records.tobytes())


def make_ledger(
    workers: int, samples: int, global_batch: int, steps: int
) -> np.ndarray[Any, np.dtype[Any]]:
    """Records of the first `steps` steps, each cut into one contiguous share a worker."""
    epoch_steps = math.ceil(samples / global_batch)
    number = np.repeat(np.arange(1, steps + 1), workers)
    worker = np.tile(np.arange(workers), steps)
    begin = (number - 1) % epoch_steps * global_batch
    size = np.minimum(global_batch, samples - begin)
    records = np.zeros(len(number), LEDGER)
    records["step"], records["worker"] = number, worker
    records["epoch"], records["generation"] = (number - 1) // epoch_steps, 1
    records["first"] = begin + size * worker // workers
    records["stop"] = begin + size * (worker + 1) // workers
    return records


def make_steps(
    ledger: np.ndarray[Any, np.dtype[Any]],
    workers: int,
    step_s: float = 0.02,
    nan_from: int | None = None,
) -> np.ndarray[Any, np.dtype[Any]]:
    """One record for each share; worker 0 is the slower one, the others wait for it."""
    steps = np.zeros(len(ledger), STEPS)
    noise = np.random.default_rng(7).random(len(ledger))
    steps["step"], steps["worker"] = ledger["step"], ledger["worker"]
    steps["samples"] = ledger["stop"] - ledger["first"]
    steps["loss"] = 2.0 / ledger["step"]
    if nan_from is not None:
        steps["loss"][ledger["step"] >= nan_from] = math.nan
    steps["begin"] = BEGIN_S + START_UP_S + (ledger["step"] - 1) * step_s
    slack = np.where(ledger["worker"] == 0, 0.0, 0.15) * step_s
    steps["load_s"] = (0.02 + 0.02 * noise) * step_s
    steps["forward_s"] = 0.25 * step_s - slack / 3
    steps["backward_s"] = 0.45 * step_s - slack * 2 / 3
    steps["wait_s"] = slack + 0.01 * step_s
    steps["wire_s"] = 0.08 * step_s
    steps["update_s"] = 0.05 * step_s
    steps["gradient_norm"] = math.nan
    steps["save_s"] = np.where(ledger["step"] == 20, 0.04 * step_s, 0.0)
    return steps


def write_events(path: Path, events: list[dict[str, Any]]) -> None:
    """Write `events.jsonl` anew."""
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (path / "events.jsonl").write_text(lines, encoding="utf-8")


def stopped_by(path: Path, rule: str, *, asked: str | None = None, **fields: Any) -> Path:
    """A folder of a run that ended at step 21 by `rule`, after a stop was requested for `asked`."""
    make_run(path, steps=21, outcome="stopped")
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    events[-1]["rule"] = rule
    wish = _event(START_UP_S + 20 * 0.02, "stop_requested", rule=asked or rule, **fields)
    write_events(path, [*events[:-1], wish, events[-1]])
    return path


def failure(at_s: float, step: int, cause: str = "target 10 is out of bounds") -> dict[str, Any]:
    """A `worker_failed` event, `at_s` seconds after the first step began."""
    return _event(
        START_UP_S + at_s,
        "worker_failed",
        worker=1,
        step=step,
        phase="forward",
        kind="IndexError",
        cause=cause,
        where="digits.py:41",
        line="return self.head(x)",
    )


def _event(at_s: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": BEGIN_S + at_s, "event": name, **fields}


def _opening(workers: int, samples: int) -> list[dict[str, Any]]:
    started = _event(
        0.0,
        "run_started",
        job={"workers": workers},
        command="instep run job.toml --workers 2",
        host={"name": "bench", "cores": 2},
        recipe_sha256="ab" * 32,
        versions={"instep": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    )
    events = [started]
    for w in range(workers):
        events.append(_event(0.2, "worker_joined", worker=w, pid=4000 + w, seconds=0.2))
        ready = {
            "device": "cpu",
            "threads": 1,
            "parameters": 109_386,
            "samples": samples,
            "validation_samples": 360,
            "loader": "in process",
            "phases": {name: s * (1 + 0.2 * w) for name, s in PHASES.items()},
        }
        events.append(_event(2.4, "worker_ready", worker=w, **ready))
    members = list(range(workers))
    events.append(
        _event(
            1.9, "generation_started", generation=1, members=members, reason="start", seconds=0.1
        )
    )
    return events


def _milestones(epoch_steps: int, total: int, step_s: float, metrics: bool) -> list[dict[str, Any]]:
    events = []
    for epoch in range(total // epoch_steps):
        step = (epoch + 1) * epoch_steps
        at_s = START_UP_S + step * step_s
        events.append(_event(at_s, "epoch_finished", epoch=epoch, step=step, loss=0.1, samples=1))
        if metrics:
            values = {"loss": 1.5 / (epoch + 1), "accuracy": 1 - 0.4 / (epoch + 1)}
            found = {"metrics": values, "samples": 360, "seconds": 0.05}
            events.append(_event(at_s + 0.01, "validated", step=step, epoch=epoch, **found))
    if total >= 20:
        saved = {"path": "checkpoints/step-20", "size_bytes": 1_300_000}
        at_s = START_UP_S + 20 * step_s
        events.append(
            _event(at_s, "checkpoint_saved", step=20, held_s=0.004, seconds=0.02, **saved)
        )
    if total:
        model = {"path": "model.safetensors", "parameters_sha256": "3f" * 32, "size_bytes": 437_000}
        events.append(_event(START_UP_S + total * step_s + 1.0, "model_saved", step=total, **model))
    return events
