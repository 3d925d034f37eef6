"""A search as a job of a pool: one client, whose trials have as many workers as the pool says.

The number is in a file that the search reads again and again; where it shrinks, trials shrink or
stop at a commit. Trials whose search was killed are asked to stop, and hold their cores until they
have. Way in: `PooledSearches`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from instep import detached
from instep.errors import InstepError
from instep.plain_file import replace_plain
from instep.pool.jobs import PoolJob
from instep.pool.run_events import RunEvents
from instep.pool.scheduler import JobSight
from instep.search.begin import found_in
from instep.search.record import FILE
from instep.search.search import REFUSED


class PooledSearches:
    """The searches among the jobs of a pool.

    Args:
        jobs: folder of their job files.
        runs: folder of their folders.
    """

    def __init__(self, jobs: Path, runs: Path) -> None:
        self._jobs, self._runs = jobs, runs
        self._trials: dict[Path, RunEvents] = {}
        self._interrupted: set[int] = set()  # processes of trials without a search

    def words(self, job: PoolJob) -> list[str]:
        """The command that begins it, or continues it; its workers are written down."""
        self.write_workers(job)
        folder = self._runs / job.id
        words = ["search", str(self._jobs / f"{job.id}.toml"), "--runs", str(self._runs)]
        words += ["--name", job.id]
        if (folder / FILE).is_file():
            words = ["search", str(folder)]
        return [*words, "--workers-file", str(self._file(job)), "--json"]

    def write_workers(self, job: PoolJob) -> None:
        """Tell it how many workers its trials may have."""
        replace_plain(self._file(job), f"{job.target}\n")

    def look(self, job: PoolJob, lock: Path, last_words: str) -> JobSight:
        """See what there is of it.

        Args:
            job: of a search.
            lock: that its client has locked.
            last_words: the error that its client has ended with.
        """
        folder = self._runs / job.id
        lives = detached.lives(lock)
        locks = [each for each in folder.glob("jobs/*.lock") if detached.lives(each)]
        workers = sum(self._workers(folder / each.stem) for each in locks)
        told, trials, over = 0, None, False
        with suppress(InstepError):  # damaged, or of another version: its client will say so
            found = found_in(folder)
            told, trials = len(found.told), found.trials
            over = told >= trials
        if lives:
            return JobSight(True, workers, told, trials)
        if locks:  # nobody decides about them
            for each in locks:
                self._interrupt(each)
            return JobSight(True, workers, told, trials)
        outcome = "completed" if over else ""
        if not over and detached.exit_code(lock) in REFUSED:
            outcome = "failed"
        return JobSight(False, step=told, outcome=outcome, why="" if over else last_words)

    def _workers(self, run: Path) -> int:
        """Processes of a trial that lives; one that has none yet is about to."""
        events = self._trials.setdefault(run, RunEvents(run))
        events.update()
        return max(1, events.workers)

    def _interrupt(self, lock: Path) -> None:
        """Ask a trial to stop at its next commit, once: asked again, it would stop at once."""
        pid = detached.pid_of(lock)
        if pid is not None and pid not in self._interrupted:
            self._interrupted.add(pid)
            detached.interrupt_it(lock)

    def _file(self, job: PoolJob) -> Path:
        return self._jobs / f"{job.id}.workers"
