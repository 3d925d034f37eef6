"""A process that follows the folder of a run, and gives its loggers what is new there.

It only reads the files that the master writes, so that it does not matter to the run what a logger
does, or how long it takes. The client starts it (`client/following.py`); when standard input ends,
the run is over. How far it has read is in `loggers.json`, for the process that comes after it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

import msgspec
import numpy as np

from instep.checksums import table_of
from instep.events import STEPS
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import plain, replace_plain
from instep.report.loggers import LOGGERS
from instep.report.loggers.base import Logger, Point
from instep.report.loggers.points import Points
from instep.store.run_files import Records

LOOK_S, FLUSH_S = 0.5, 2.0
"""Seconds between two looks at the files, and between two flushes."""

_MOST_BYTES = 1 << 22
"""Read at once."""

STATE = "loggers.json"


class Follower:
    """One logger, and how far it has come.

    Args:
        run: the folder.
        job: its job.
        name: of the logger.
        at: bytes of `events.jsonl` and of `steps.bin` that it has written already.
    """

    def __init__(self, run: Path, job: JobSpec, name: str, at: tuple[int, int]) -> None:
        self._run, self.name, self.at = run, name, at
        self._job, self._points, self.outcome = (
            job,
            Points(losses=not job.privacy.on),
            "interrupted",
        )
        self._logger: Logger | None = None  # made with its first point: a run may be refused

    def follow(self) -> bool:
        """Write what is new; whether there may be more."""
        points: list[Point] = []
        lines = _new(self._run / "events.jsonl", self.at[0])
        lines = lines[: lines.rfind(b"\n") + 1]
        for line in lines.splitlines():
            event = table_of(line)
            self._take(event)
            points += self._points.of_event(event)
        data = _new(self._run / "steps.bin", self.at[1])
        data = data[: len(data) // STEPS.itemsize * STEPS.itemsize]
        steps: Records = np.frombuffer(data, STEPS)
        points += self._points.of_steps(steps)
        if points and self._logger is None:
            self._logger = LOGGERS[self.name](self._run, self._job)
        if points and self._logger is not None:
            self._logger.write(sorted(points, key=lambda point: point.step))
        self.at = self.at[0] + len(lines), self.at[1] + len(data)
        return len(lines) + len(data) > _MOST_BYTES // 2

    def flush(self) -> None:
        """Make visible what was written."""
        if self._logger is not None:
            self._logger.flush()

    def close(self) -> None:
        """The run is over."""
        if self._logger is not None:
            self._logger.close(self.outcome)

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("resumed_step") is not None:
            self._points.go_back(event["resumed_step"])
        if event["event"] == "run_finished":
            self.outcome = event["outcome"]


def _new(path: Path, at: int, most: int = _MOST_BYTES) -> bytes:
    if not path.exists():
        return b""
    with open(path, "rb", opener=plain) as file:
        file.seek(at)
        return file.read(most)


def follow(run: Path, names: list[str]) -> int:
    """Follow a run until standard input ends; 1 if a logger failed."""
    job, state = spec_file.load(run / "job.toml"), _state(run, names)
    followers = [Follower(run, job, name, state.get(name, (0, 0))) for name in names]
    failed, flushed = False, time.monotonic()
    over, more = False, False
    while followers and (more or not over):
        over = over or bool(select([sys.stdin], [], [], 0.0 if more else LOOK_S)[0])
        more = False
        flushes = over or time.monotonic() - flushed > FLUSH_S
        flushed = time.monotonic() if flushes else flushed
        for follower in list(followers):
            try:
                more |= follower.follow()
                if flushes:
                    follower.flush()
                    state[follower.name] = follower.at
            except Exception:
                followers.remove(follower)
                failed = _failed(follower.name)
        if flushes:
            with suppress(OSError):  # without it a successor writes some points again: no harm
                replace_plain(run / STATE, json.dumps(state))
    for follower in followers:
        try:
            follower.close()
        except Exception:
            failed = _failed(follower.name)
    return int(failed)


def _state(run: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    path = run / STATE
    if not path.exists():
        return {}
    try:
        with open(path, "rb", opener=plain) as file:
            found = msgspec.json.decode(file.read(), type=dict[str, tuple[int, int]])
        for name in names:
            _check_place(run, *found.get(name, (0, 0)))
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        print(f"{path} cannot be read: {error}. All points are written again.", file=sys.stderr)
        return {}
    return found


def _check_place(run: Path, events: int, steps: int) -> None:
    """Refuse a place at which no line of events and no record of a step ends.

    Raises:
        ValueError: says which.
    """
    if not 0 <= steps <= _size(run / "steps.bin") or steps % STEPS.itemsize:
        raise ValueError(f"no record ends at byte {steps} of steps.bin")
    before = _new(run / "events.jsonl", events - 1, 1) if events > 0 else b"\n"
    if events < 0 or before != b"\n":
        raise ValueError(f"no line ends at byte {events} of events.jsonl")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _failed(name: str) -> bool:
    print(f"the logger {name!r} failed:", file=sys.stderr)
    traceback.print_exc()
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the client gets them, and ends the run
    code = follow(Path(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(code)  # nothing is left to run down
