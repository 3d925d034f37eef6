"""The runs of a pool on this machine: started, resized, stopped and looked at. It decides nothing.

Way in: `LocalRuns`, which is the `Hands` of a scheduler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep import detached
from instep.checksums import table_of
from instep.client.running import scale
from instep.errors import InstepError, RunError, SpecError
from instep.events import LEDGER, read_records
from instep.plain_file import plain, read_plain
from instep.pool.commands import ending_of
from instep.pool.flow_file import METRICS, OF_A_RUN
from instep.pool.jobs import COMMAND, PoolJob
from instep.pool.policy import speed
from instep.pool.scheduler import LATER, REFUSED, SCALED, JobSight
from instep.store.run_folder import RunFolder

LOOK_S = 1.0
"""The steps of a run are read so often."""

MEASURED_S = 2.0
"""Least time over which the speed of a run is measured."""

Start = Callable[[Sequence[str], Path, Path], object]


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
            self.stop_requested = False
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


class LocalRuns:
    """The runs of a pool's jobs.

    Args:
        jobs: folder of their job files, locks and logs.
        runs: folder of run folders.
        start: starts a command of instep, as `detached.start` does.
    """

    def __init__(self, jobs: Path, runs: Path, start: Start = detached.start) -> None:
        self._jobs, self._runs, self._start = jobs, runs, start
        self._events: dict[str, RunEvents] = {}
        self._paces: dict[str, RunPace] = {}
        self._stopped: dict[str, int] = {}  # process that was asked to stop

    def look(self, job: PoolJob) -> JobSight:
        """See what there is of a job's run."""
        run, lives = self._runs / job.id, detached.lives(self._lock(job))
        if job.kind == COMMAND:
            return self._look_at_command(job, lives)
        events = self._events.setdefault(job.id, RunEvents(run))
        pace = self._paces.setdefault(job.id, RunPace())
        if lives:
            events.update()
            pace.update(run, events.workers)
            left = pace.left_s(events.steps)
            return JobSight(True, events.workers, pace.step, events.steps, left)
        del self._events[job.id], self._paces[job.id]
        if not (run / "job.toml").is_file():
            return JobSight(False, why=self._last_words(job))
        if job.attempt > 1 and not detached.has_begun(self._lock(job)):
            return JobSight(False)  # how it ended before is not how it ends
        outcome, why, step = "", "", 0
        with suppress(RunError):
            found = RunFolder(run)
            outcome, step = found.outcome, found.last_step
            if outcome in ("interrupted", "unfinished"):
                outcome = ""
            if outcome == "failed":
                why = self._last_words(job)
        results = _figures(run) if job.flow and outcome else {}
        return JobSight(False, step=step, outcome=outcome, why=why, results=results)

    def _look_at_command(self, job: PoolJob, lives: bool) -> JobSight:
        if lives or not detached.has_begun(self._lock(job)):
            return JobSight(lives, workers=int(lives))
        ending = ending_of(self.ending(job))
        if ending is not None:
            outcome = "failed" if ending.code else "completed"
            why = ending.text if ending.code else ""
            return JobSight(False, outcome=outcome, why=why, results={"seconds": ending.seconds})
        if job.cancelled:
            return JobSight(False)
        why = "it was killed, and may have done a part. To run it once more: --again"
        return JobSight(False, outcome="failed", why=why)

    def start(self, job: PoolJob) -> None:
        """Start the client of a job, unless one lives."""
        run = self._runs / job.id
        file = self._jobs / f"{job.id}.toml"
        words = ["run", str(file), "--runs", str(self._runs), "--name", job.id]
        if (run / "job.toml").is_file():
            words = ["resume", str(run)]
        words += ["--workers", str(job.target), "--json"]
        if job.kind == COMMAND:
            words = ["pool", "--pool", str(self._jobs.parent), "command", job.id]
        with suppress(OSError):  # it is tried again
            self._start(words, self._lock(job), self._log(job))

    def scale(self, job: PoolJob) -> str:
        """Ask a run for `job.target` workers."""
        if job.kind == COMMAND:
            return SCALED  # it has the one that it can have
        try:
            scale(self._runs / job.id, job.target)
        except SpecError:  # one that is not ready, or about to end, refuses too
            events = self._events.get(job.id)
            return REFUSED if events is not None and events.on_gpus else LATER
        except InstepError:  # it is starting, or ending
            return LATER
        return SCALED

    def stop(self, job: PoolJob) -> None:
        """Ask a run to stop at its next commit, once: asked again, it would stop at once."""
        lock = self._lock(job)
        pid, events = detached.pid_of(lock), self._events.get(job.id)
        if pid is None or self._stopped.get(job.id) == pid:
            return
        self._stopped[job.id] = pid
        if events is None or not events.stop_requested:
            detached.interrupt_it(lock)

    def ending(self, job: PoolJob) -> Path:
        """The file in which a command's process writes how it has ended."""
        return self._jobs / f"{_of_attempt(job)}.ended"

    def _lock(self, job: PoolJob) -> Path:
        return self._jobs / f"{_of_attempt(job)}.lock"

    def _log(self, job: PoolJob) -> Path:
        return self._jobs / f"{job.id}.log"

    def _last_words(self, job: PoolJob) -> str:
        return detached.last_words(self._log(job))


def _of_attempt(job: PoolJob) -> str:
    return job.id if job.attempt == 1 else f"{job.id}.{job.attempt}"


def _figures(run: Path) -> dict[str, float]:
    """Numbers of a run that is over, from its summary."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, AttributeError):
        summary = json.loads(read_plain(run / "summary.json"))
        named = {METRICS + name: value for name, value in summary["metrics"].items()}
        named |= {name: summary.get(name) for name in OF_A_RUN}
        found = {n: float(v) for n, v in named.items() if isinstance(v, int | float)}
    return found
