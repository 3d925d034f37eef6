"""The runs of a pool: started, resized, stopped and looked at. It decides nothing.

Their clients are on this machine, and their workers too, unless the pool has hosts.

Way in: `LocalRuns`, which is the `Hands` of a scheduler.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from instep import detached
from instep.client.running import scale
from instep.errors import InstepError, RunError, SpecError
from instep.launch.pooled.launcher import Placed
from instep.plain_file import read_plain
from instep.pool.commands.running import ending_of
from instep.pool.flow_file import METRICS, OF_A_RUN
from instep.pool.jobs import COMMAND, SEARCH, PoolJob
from instep.pool.pool_file import CERTIFICATES
from instep.pool.run_events import RunEvents, RunPace
from instep.pool.scheduler import LATER, REFUSED, SCALED, JobSight
from instep.pool.searches import PooledSearches
from instep.search.record import FILE as RECORD
from instep.store.run_folder import RunFolder

Start = Callable[[Sequence[str], Path, Path], object]


ANSWER_S = 0.5
"""A run that has not answered by then is not waited for: its answer is looked at later."""


class _ScaleQuestion:
    """A run is asked for a job's workers, in a thread: one that is stopped answers after long."""

    def __init__(self, run: Path, job: PoolJob, places: list[int] | None) -> None:
        self.about = job.target, job.places
        self._run, self._places = run, places
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            scale(self._run, self.about[0], self._places)
        except Exception as error:
            self._error = error

    def wait(self, timeout_s: float) -> None:
        """Wait for the answer, for so long at most."""
        self._thread.join(timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or will be none."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise what asking has raised, if it has."""
        if self._error is not None:
            raise self._error


class LocalRuns:
    """The runs of a pool's jobs.

    Args:
        jobs: folder of their job files, locks and logs.
        runs: folder of run folders.
        start: starts a command of instep, as `detached.start` does.
        hosts: of the pool, by their numbers; none if all is on this machine.
        address: of this machine, which hosts reach.
    """

    def __init__(
        self,
        jobs: Path,
        runs: Path,
        start: Start = detached.start,
        hosts: Sequence[str] = (),
        address: str = "",
    ) -> None:
        self._jobs, self._runs, self._start = jobs, runs, start
        self._hosts, self._address = [*hosts], address
        self._searches = PooledSearches(jobs, runs)
        self._events: dict[str, RunEvents] = {}
        self._paces: dict[str, RunPace] = {}
        self._stopped: dict[str, int] = {}  # process that was asked to stop
        self._questions: dict[str, _ScaleQuestion] = {}

    def look(self, job: PoolJob) -> JobSight:
        """See what there is of a job's run."""
        run, lives = self._runs / job.id, detached.lives(self._lock(job))
        if job.kind == COMMAND:
            return self._look_at_command(job, lives)
        if not lives and self._is_of_others(job):
            why = (
                f"{run} was there before this pool has started it: another command has taken the "
                "name. Submit the job once more; where it has a key, with another one"
            )
            return JobSight(False, outcome="failed", why=why)
        if job.kind == SEARCH:
            return self._searches.look(job, self._lock(job), self._last_words(job))
        events = self._events.setdefault(job.id, RunEvents(run))
        if job.id not in self._paces:
            self._paces[job.id] = RunPace(run, job.paces)
        pace = self._paces[job.id]
        if lives:
            events.update()
            pace.update(events.workers)
            left = pace.left_s(events.steps)
            lost = tuple(name for n, name in enumerate(self._hosts) if n not in events.hosts)
            lost = () if job.local else lost
            seen = JobSight(True, events.workers, pace.step, events.steps, left)
            seen = seen._replace(pace=pace.pace, first=pace.first)
            return seen._replace(lost=lost, begun=events.begun or job.local)
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
            if outcome in ("completed", "stopped") and (why := _not_finite(run)):
                outcome = "failed"
            elif outcome == "failed":
                why = self._last_words(job)
        results = _figures(run) if job.flow and outcome else {}
        ended = JobSight(False, step=step, outcome=outcome, why=why, results=results)
        if outcome == "completed":
            pace.update(events.workers, at_once=True)
            ended = ended._replace(last=pace.last, pace=pace.pace)
        return ended

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
        """Start the client of a job, unless one lives, or its folder is somebody else's."""
        run = self._runs / job.id
        if self._is_of_others(job):
            return  # how it is seen next says why
        file = self._jobs / f"{job.id}.toml"
        words = ["run", str(file), "--runs", str(self._runs), "--name", job.id]
        if (run / "job.toml").is_file():
            words = ["resume", str(run)]
        words += ["--workers", str(job.target), "--json"]
        if job.kind == COMMAND:
            words = ["pool", "--pool", str(self._jobs.parent), "command", job.id]
        with suppress(OSError):  # it is tried again
            if job.kind == SEARCH:
                words = self._searches.words(job)
            if job.places and not job.local:
                gate_file(self._jobs, job.id).unlink(missing_ok=True)  # that of its last client
                self._placed(job).write(placed_file(self._jobs, job.id))
                words += self._on_hosts(job)
            self._start(words, self._lock(job), self._log(job))

    def scale(self, job: PoolJob) -> str:
        """Ask a run for `job.target` workers."""
        if job.kind == COMMAND:
            return SCALED  # it has the one that it can have
        if job.kind == SEARCH:
            with suppress(OSError):
                self._searches.write_workers(job)
                return SCALED
            return LATER
        try:
            question = self._questions.get(job.id)
            if question is None:
                places = None
                if job.places and not job.local:  # written first: another master reads it
                    placed = self._placed(job)
                    placed.write(placed_file(self._jobs, job.id))
                    places = placed.workers[: job.reach]
                question = _ScaleQuestion(self._runs / job.id, job, places)
                self._questions[job.id] = question
                question.wait(ANSWER_S)
            if not question.is_over:
                return LATER
            del self._questions[job.id]
            if question.about != (job.target, job.places):
                return LATER  # others are wanted by now
            question.check()
        except OSError:  # no room on the disk
            return LATER
        except SpecError:  # one that is not ready, or about to end, refuses too
            events = self._events.get(job.id)
            return REFUSED if events is not None and events.on_gpus else LATER
        except InstepError:  # it is starting, or ending
            return LATER
        return SCALED

    def _is_of_others(self, job: PoolJob) -> bool:
        """Whether somebody else has made the folder of a run: no client of the job has begun."""
        begun = detached.has_begun(self._lock(job)) or self._log(job).exists()
        if begun or job.kind == COMMAND:
            return False
        return any((self._runs / job.id / name).is_file() for name in ("job.toml", RECORD))

    def _on_hosts(self, job: PoolJob) -> list[str]:
        """Words that have a run use the hosts of the pool."""
        files = {
            "certificates": self._jobs.parent / CERTIFICATES,
            "placed": placed_file(self._jobs, job.id),
            "gate": gate_file(self._jobs, job.id),
        }
        options = {f"launch.options.{key}": str(path.resolve()) for key, path in files.items()}
        settings = {"launch.on": "pool", "launch.address": self._address, **options}
        return [
            word
            for key, value in settings.items()
            for word in ("--set", f"{key}={json.dumps(value)}")
        ]

    def _placed(self, job: PoolJob) -> Placed:
        return Placed(self._hosts, [job.places.get(name, 0) for name in self._hosts])

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


def placed_file(jobs: Path, job: str) -> Path:
    """The file that says how many workers a run may have on each host."""
    return jobs / f"{job}.places"


def gate_file(jobs: Path, job: str) -> Path:
    """The file in which a run writes where it listens for its hosts."""
    return jobs / f"{job}.gate"


def _of_attempt(job: PoolJob) -> str:
    return job.id if job.attempt == 1 else f"{job.id}.{job.attempt}"


def _not_finite(run: Path) -> str:
    """Say why a run that is over has diverged, from its summary; empty if it has not."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        summary = json.loads(read_plain(run / "summary.json"))
        return (summary["rule_text"] or "its loss is not finite") if summary["diverged"] else ""
    return ""


def _figures(run: Path) -> dict[str, float]:
    """Numbers of a run that is over, from its summary."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        summary = json.loads(read_plain(run / "summary.json"))
        named = {METRICS + name: value for name, value in summary["metrics"].items()}
        named |= {name: summary.get(name) for name in OF_A_RUN}
        found = {n: float(v) for n, v in named.items() if isinstance(v, int | float)}
    return found
