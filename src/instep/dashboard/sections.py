"""The parts of a run's page as plain data, of a run that trains or has ended.

Each has the same form for both, so that the page does not know which it is. Nothing here is markup.
Ways in: `live_sections`, `settled_sections`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instep.dashboard.live import LiveRun
from instep.dashboard.logs import LogEnds
from instep.plain_file import read_plain
from instep.report.figures.identity import flat
from instep.report.figures.participants import of_participants
from instep.report.figures.progress import Row
from instep.report.figures.proof import prove
from instep.report.figures.summary import (
    cause_words,
    exactness_words,
    finite,
    summarise,
    time_split,
    verdict_of,
)
from instep.report.terminal.screen import notice, progress_words, waiting_for
from instep.report.terminal.status import Status, next_commands
from instep.store.run_files import PARTS, Event, Floats
from instep.store.run_folder import RunFolder
from instep.units import readable_count, readable_seconds
from instep.words import command

_MOST_EVENTS, _MOST_WORKERS, _MOST_SETTINGS = 200, 64, 400

_FILES = (
    "job.toml",
    "run.id",
    "events.jsonl",
    "ledger.bin",
    "steps.bin",
    "steps.crc",
    "summary.json",
)
_MOST_OF_A_SUMMARY = 1 << 24
_LOST = ("worker_failed", "worker_lost", "worker_hung", "host_lost", "corruption_found")


def live_sections(run: LiveRun, state: str) -> dict[str, Any]:
    """Parts of the page of a run that is read as it grows."""
    progress = run.progress
    status = run.status(state)
    text = f"Running for {readable_seconds(run.times.seconds)}: {progress_words(progress)}."
    if not progress.steps_seen and state == "running":
        text = f"Starting: {waiting_for(progress)}."
    elif state != "running":
        opening = "Cut short" if state == "unfinished" else state.capitalize()
        text = f"{opening} after {readable_seconds(run.times.seconds)}, "
        text += f"{readable_count(run.last_step)} steps."
    ended = {"completed": "good", "running": "live", "failed": "bad"}
    verdict = {"mark": ended.get(state, "calm"), "text": text}
    audit = run.ledger.as_table()
    audit_text, over = _audit_words(audit), state != "running"
    summary = _written_summary(run.path) if over else None
    if summary is not None:
        with suppress(KeyError, TypeError, ValueError):  # another version may lack a field
            mark, text = verdict_of(summary, over=True)
            audit_text = _used_words(summary)
            verdict = {"mark": mark, "text": text}
    resume = command("resume", run.path)
    return {
        **run.once("shared", lambda: _shared(run, run.times.elapsed)),
        "participants": _participants(run),
        "logs": run.logs.look(),
        "read": None if run.share_read == 1.0 else round(run.share_read, 2),
        "verdict": verdict,
        "status": status,
        "summary": summary,
        "seconds": round(run.times.seconds, 1),
        "workers": _live_workers(run, over=over and run.share_read == 1.0),
        "audit": {**audit, "text": audit_text},
        "next": next_commands(run.path, state, run.last_step, resume, run.joined),
    }


def settled_sections(folder: RunFolder) -> dict[str, Any]:
    """Parts of that of a run that has ended: `instep status --json` and `summary.json`."""
    status, summary = Status(folder.path), summarise(folder)
    mark, text = verdict_of(summary, over=True)
    proof = prove(folder)
    audit = {key: value for key, value in proof.as_table().items() if key != "epochs"}
    audit["untiled_steps"] = len(proof.untiled)
    return {
        **_shared(folder, folder.times.elapsed),
        "participants": _participants(folder),
        "logs": LogEnds(folder.path).look(),
        "read": None,
        "verdict": {"mark": mark, "text": text},
        "status": status.as_table(),
        "summary": _written_summary(folder.path) or summary,
        "seconds": round(folder.times.seconds, 1),
        "workers": _settled_workers(folder, status),
        "audit": {**audit, "text": _used_words(summary)},
        "next": status.next_commands(),
    }


def _written_summary(path: Path) -> dict[str, Any] | None:
    """Read what the run itself has written, where that is newer than its events."""
    file = path / "summary.json"
    with suppress(OSError):
        if file.is_symlink() or file.stat().st_mtime < (path / "events.jsonl").stat().st_mtime:
            return None
    return summary_of(path) or None


def summary_of(path: Path) -> dict[str, Any]:
    """Give the contents of a run's `summary.json`; empty if there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        file = path / "summary.json"
        found = json.loads(read_plain(file)) if file.lstat().st_size <= _MOST_OF_A_SUMMARY else {}
        return found if isinstance(found, dict) else {}
    return {}


def encoded_json(value: Any) -> bytes:
    """Encode plain data for a page: what is not finite becomes null, and text that no file of
    UTF-8 has (a half of a pair) is replaced."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_in_utf8(value))


def _in_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_in_utf8(key): _in_utf8(each) for key, each in value.items()}
    return [_in_utf8(each) for each in value] if isinstance(value, list | tuple) else value


def _shared(run: LiveRun | RunFolder, elapsed: Any) -> dict[str, Any]:
    """Give what follows from the job and from events alone."""
    members = run.members
    events = run.events
    saved = [e for e in events if e["event"] == "checkpoint_saved"]
    return {
        "name": run.path.name,
        "path": str(run.path),
        "job": run.spec.name,
        "epochs": run.spec.train.epochs,
        "events": _happened(events, members.servers, elapsed),
        "generations": len(members.generations),
        "checkpoints": [_plain(each, elapsed) for each in saved[-_MOST_EVENTS:]],
        "saved": len(saved),
        "settings": [list(pair) for pair in flat(run.job)][:_MOST_SETTINGS],
    }


def _participants(run: LiveRun | RunFolder) -> dict[str, Any] | None:
    found = of_participants(run)
    return found and finite(found._asdict())


def _plain(event: Event, elapsed: Any) -> dict[str, Any]:
    table = {key: event.get(key) for key in ("step", "path", "size_bytes", "held_s", "seconds")}
    return {**table, "at": round(float(elapsed(event["time"])), 2)}


def _happened(events: list[Event], servers: Collection[int], elapsed: Any) -> list[dict[str, Any]]:
    """List what changed the run, oldest first; of many, the newest."""
    found, generations = [], 0
    for event in events:
        what = event["event"]
        generations += what == "generation_started"
        with suppress(KeyError, TypeError, AttributeError):  # a field that another version lacks
            if text := _words(event, generations, servers):
                kind = "bad" if what in _LOST else "calm"
                kind = "new" if what in ("generation_started", "run_started") else kind
                at = round(float(elapsed(event["time"])), 2)
                found.append({"at": at, "time": event["time"], "kind": kind, "text": text})
    return found[-_MOST_EVENTS:]


def _words(event: Event, generations: int, servers: Collection[int]) -> str:
    what = event["event"]
    if what == "run_started":
        resumed = event.get("resumed_step")
        return "started" if resumed is None else f"resumed from step {readable_count(resumed)}"
    if what == "generation_started" and generations == 1:
        members = event["members"]
        count = len(members) if isinstance(members, list) else members
        return f"first generation, with {count} processes"
    if what == "run_finished":
        return f"{event['outcome']} at step {readable_count(event.get('step') or 0)}"
    if what == "worker_lost":
        cause = event.get("cause") or "no cause is known"
        return f"worker {event['worker']} was lost at step {event.get('step')}: {cause}"
    if what == "host_lost":
        return f"host {event['host']} was lost: {event.get('why')}"
    said = notice(event, generations=generations, servers=servers) or ""
    return f"{said}: {cause_words(event)}" if what == "worker_failed" else said


def _used_words(summary: Mapping[str, Any]) -> str:
    used = readable_count(summary["samples"])
    return f"{used} samples, {exactness_words(dict(summary))}."


def _audit_words(audit: Mapping[str, Any]) -> str:
    used = readable_count(audit["used"])
    if audit["wrong_steps"]:
        wrong = readable_count(audit["wrong_steps"])
        return f"{used} samples used; {wrong} steps did not take what the job gives them."
    if audit["exact"]:
        step = readable_count(audit["last_step"])
        return f"{used} samples used; up to step {step} each step took exactly what is due."
    return f"{used} samples used; whether each was used once is checked at the end."


def _live_workers(run: LiveRun, *, over: bool) -> list[dict[str, Any]]:
    rows = run.workers
    if len(rows) > _MOST_WORKERS:
        rows, _ = run.progress.rows(_MOST_WORKERS)
    whole = max(sum(each.samples for each in run.steps.workers.values()), 1.0)
    rows = _with_earlier(rows, run.steps.workers if over else ())
    found = []
    for row in rows:
        number = int(row.name) if row.name.isdigit() else -1
        if over and number in run.steps.workers:
            mine = run.steps.workers[number]
            found.append(_ended_row(row, mine.samples, whole, mine.seconds, mine.parts))
        else:
            found.append({**row._asdict(), "parts": _parts(run.steps.parts.get(number))})
    return sorted(found, key=_by_name)


def _with_earlier(rows: list[Row], numbers: Collection[int]) -> list[Row]:
    """Add those that computed in an earlier session alone, as long as there is room."""
    known = {row.name for row in rows}
    missing = [str(number) for number in numbers if str(number) not in known]
    return rows + [
        Row(name, "left", 0, 0, 0, 0, 0) for name in missing[: _MOST_WORKERS - len(rows)]
    ]


def _ended_row(
    row: Row, samples: float, whole: float, took: float, seconds: Sequence[float] | Floats
) -> dict[str, Any]:
    """Figures of a worker of a run that has ended: of all its steps."""
    wait = float(seconds[PARTS.index("wait")])
    table = {
        **row._asdict(),
        "share": samples / whole,
        "rate": samples / took if took else 0.0,
        "wait": wait / took if took else 0.0,
    }
    return {**table, "parts": _parts(seconds)}


def _by_name(row: Mapping[str, Any]) -> tuple[bool, str]:
    return not row["name"].isdigit(), row["name"].zfill(9)


def _parts(seconds: Any) -> dict[str, float] | None:
    """The part of the time that each part of a step takes, 0 to 1."""
    if seconds is None or not (whole := float(np.sum(seconds))):
        return None
    return {name: round(float(s) / whole, 4) for name, s in zip(PARTS, seconds, strict=True)}


def _settled_workers(folder: RunFolder, status: Status) -> list[dict[str, Any]]:
    rows, _ = status.progress.rows(_MOST_WORKERS)
    rows = _with_earlier(rows, folder.members.numbers)
    whole = max(float(folder.steps["samples"].sum()), 1.0)
    found = []
    for row in rows:
        number = int(row.name) if row.name.isdigit() else -1
        mine, split = folder.steps_of(number), time_split(folder, number)
        took = folder.times.training_seconds(number) if len(mine) else 0.0
        seconds = [split[part] for part in PARTS]
        found.append(_ended_row(row, float(mine["samples"].sum()), whole, took, seconds))
    return sorted(found, key=_by_name)


def look_at(path: Path) -> list[tuple[str, int, int, int]] | None:
    """Another value whenever a file that is read here has changed; None if one of them is a link,
    as what it shows would not be the run's, or else no file, as a pipe keeps its reader."""
    found, folder = [], str(path)
    for name in _FILES:
        with suppress(FileNotFoundError):
            about = os.lstat(f"{folder}/{name}")
            if not stat.S_ISREG(about.st_mode):
                return None
            found.append((name, about.st_size, about.st_mtime_ns, about.st_ino))
    return found
